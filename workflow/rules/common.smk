"""The functions that rules use, and the statements that hold for all rules."""

from snaketune.config.base import JOB_PATTERN
from snaketune.snakemake_adapter.adapter import Adapter

adapter = Adapter(workflow, config, rules, PACKAGE_ROOT)
inputs_of, spec_of = adapter.inputs_of, adapter.spec_of
threads_of, resources_of, group_of = adapter.threads_of, adapter.resources_of, adapter.group_of
results_of, line_of = adapter.results_of, adapter.line_of


wildcard_constraints:
    name=JOB_PATTERN,
    evaluation=JOB_PATTERN,
    model=JOB_PATTERN,
    variant=JOB_PATTERN,
    part=r"\d+-of-\d+",
    repeat=r"\d+",


# Of the jobs in a group, which run one after the other.
resource_scopes:
    turn="local",


if adapter.links_inputs:

    # Inputs on the volume are linked into a pod, not copied.
    inputflags:
        access.sequential,


onstart:
    adapter.on_start()


onsuccess:
    adapter.on_success()


onerror:
    adapter.on_error()
