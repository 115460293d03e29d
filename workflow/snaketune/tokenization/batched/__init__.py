"""Whole batches of conversations to tokens at once."""
