"""Publishing of models: model cards, pushes to the Hub, GGUF files."""
