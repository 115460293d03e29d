"""Snakemake, as the rules use it: no other package imports it. docs/upgrades.md lists what is undocumented of it.

`adapter.py` is what `workflow/rules/` and the profiles call: it plans the jobs of a config and gives each rule its inputs, spec
and resources. `package.py` gives jobs the package of the rules' revision; `slurm_executor.py` tells what Snakemake's SLURM
executor will do with a job.
"""
