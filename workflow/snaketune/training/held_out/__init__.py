"""Held-out rows that are measured while a training runs, and what the measurements decide."""
