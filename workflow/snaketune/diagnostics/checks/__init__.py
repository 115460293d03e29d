"""The checks of a finished training: each compares what it guards with the same computed in another way."""
