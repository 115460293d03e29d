"""SLURM: the resources that jobs request, the limits of its partitions, why jobs are pending, when a job has to end."""
