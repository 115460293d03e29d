"""Preference optimization: losses, trainer, batches, metrics and the monitor of a training."""
