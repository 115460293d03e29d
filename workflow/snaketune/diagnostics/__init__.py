"""Checks before a training (`preflight`), and what limits the speed of one (`doctor`)."""
