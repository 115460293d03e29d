"""Evaluation: held-out loss, exact match, preference accuracy, lm-eval tasks, samples."""
