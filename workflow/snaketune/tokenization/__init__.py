"""Tokenizer training and adoption, chat templates, token and loss masks.

    tokenizer   the stage, with making/: trained or adopted, checked before use
    tokenize    the stage: a corpus in parts to token files (tokens), which packing reads

A conversation on its ordinary path: turns of the corpus (turns) → text by the chat template (template, or unmarked) → ids and
what assistants say (chat, token_spans, with control where somebody wrote a control token) → masks (encode) → rows
(token_rows). Beside it batched/ does the same for many at once.
"""
