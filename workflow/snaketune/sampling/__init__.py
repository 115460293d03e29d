"""Responses of models to prompts: their engines (transformers, vLLM, a server), their cache, and the stages `prompts`,
`generate` and `sample`."""
