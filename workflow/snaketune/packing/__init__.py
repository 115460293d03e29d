"""Packing of token sequences into rows of fixed length: the plan, the segments of a row, and the shards on disk."""
