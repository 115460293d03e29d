rule timing:
    """Time a short training of a run or of a variant of it."""
    input:
        unpack(inputs_of("timing")),
    output:
        manifest="results/timing/{name}/{variant}/{repeat}/manifest.json",
        payload=directory("results/timing/{name}/{variant}/{repeat}/measured"),
        run="results/timing/{name}/{variant}/{repeat}/run.json",
    log:
        "results/logs/timing/{name}/{variant}/{repeat}.log",
    group:
        group_of("timing")
    conda:
        "../../envs/train.yaml"
    threads: threads_of("timing")
    resources:
        **resources_of("timing"),
    params:
        spec=spec_of("timing"),
    message:
        line_of("timing/{wildcards.name}/{wildcards.variant}/{wildcards.repeat}")
    shell:
        "trap '' TERM; python -m snaketune timing {input.job:q} 2>&1 | (trap '' INT HUP; tee {log:q})"
