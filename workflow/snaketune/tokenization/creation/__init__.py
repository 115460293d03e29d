"""Creation of a run's tokenizer: trained on its corpora or adopted from a base model, and checked before use."""
