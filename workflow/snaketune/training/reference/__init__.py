"""Reference log-probabilities: computing, gathering, caching, reading and exporting them."""
