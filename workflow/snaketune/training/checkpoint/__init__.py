"""Checkpoints without pickles, exact resume, and the saved model."""
