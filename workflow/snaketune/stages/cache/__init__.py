"""What is current: fingerprints, code digests, work folders, and results built once."""
