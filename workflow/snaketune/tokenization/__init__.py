"""Tokenizer training and adoption, chat templates, token and loss masks."""
