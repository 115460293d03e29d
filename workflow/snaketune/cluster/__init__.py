"""SLURM: the resources that jobs request, the limits of its partitions, why jobs are pending, when a job has to end.

`estimates.py` gives a job's time and memory, `resources.py` the resources of its rule, and `submission_check.py` refuses before
a submission what no partition could run.
"""
