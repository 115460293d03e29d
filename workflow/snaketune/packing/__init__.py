"""The stages plan, write and pack: from tokenized corpora to shards on disk, and their rows."""
