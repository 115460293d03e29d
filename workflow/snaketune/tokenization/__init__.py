"""Tokenizer training and adoption, chat templates, token and loss masks.

The reference path encodes row by row: turns of the corpus (turn_columns) → text by the chat template (template, or
assistant_spans if the template marks nothing as generated) → ids and assistant spans (chat; control if a message contains the
string of a control token) → loss masks (encode_rows) → stored rows (token_rows). batched/ computes the same for whole batches.
"""
