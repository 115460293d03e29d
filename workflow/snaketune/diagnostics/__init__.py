"""Preflight checks before a training, audits of its speed, and timed comparisons of settings (`diagnose:`, `doctor`)."""
