"""Preference optimization: its losses, its trainer, its batches and its metrics."""
