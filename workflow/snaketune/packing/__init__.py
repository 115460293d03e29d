"""The stages plan, write and pack: from tokenized corpora to shards on disk, and their rows.

`plan` assigns sequences to rows, `write` writes parts of the shards, and `pack` joins them. The algorithms are the engine's
(`engine/packing/`); `reader.py` opens a pack for trainings and evaluations.
"""
