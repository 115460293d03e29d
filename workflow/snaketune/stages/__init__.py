"""How a stage is run: the table of all stages, the jobs that a config asks for, fingerprints, work folders, code, GPU slots."""
