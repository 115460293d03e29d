"""Publishing of models: model cards, RO-Crates, pushes to the Hub, GGUF files.

The stages `card` and `convert`, and the command `push`, which is the only one that uploads models.
"""
