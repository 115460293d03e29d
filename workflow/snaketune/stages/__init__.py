"""Running stages: declarations, the planner and its jobs, job files, fingerprints and work folders, locks and GPU slots."""
