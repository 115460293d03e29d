"""Running stages: declarations, the planner and its jobs, job files, fingerprints and work folders, locks and GPU slots.

`declaration.py` says what a stage declares, `specs.py` holds the slices of the config that stages read, and `table.py` lists
the stages. `planner.py` and `plan/` turn a config into jobs; `cache/status.py` says which are stale and why; `run.py` runs a
job, in a work folder and under a lease (`cache/`). `host/` knows the machine: GPUs, threads, locks, the launch of processes.
"""
