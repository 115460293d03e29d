"""What makes a result fit to be handed on: model cards, pushes to the Hub, GGUF files."""
