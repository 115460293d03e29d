"""Which results are current and which can be reused: fingerprints, code digests, work folders, status of results."""
