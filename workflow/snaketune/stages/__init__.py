"""How a stage is run: the table of all stages, the jobs of a config, fingerprints, work folders, code digests, GPU slots."""
