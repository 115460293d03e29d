"""Where the tokenizer of a run comes from: trained on its corpora or adopted from a base model, and checked before use."""
