"""Reference log-probabilities: computed, gathered, cached and read."""
