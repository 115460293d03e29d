"""Models: loading, attention over segments, log-probabilities and losses, devices."""
