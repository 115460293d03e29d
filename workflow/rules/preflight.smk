rule preflight:
    """Check the runs of a family, before the first of them is trained, for what would stop or slow them down."""
    input:
        unpack(inputs_of("preflight")),
    output:
        manifest="results/preflight/{name}/manifest.json",
        payload=directory("results/preflight/{name}/findings"),
        run="results/preflight/{name}/run.json",
    log:
        "results/logs/preflight/{name}.log",
    # What it finds doesn't change from attempt to attempt.
    retries: 0
    group:
        group_of("preflight")
    conda:
        "../../envs/train.yaml"
    threads: 1
    resources:
        **resources_of("preflight"),
    params:
        spec=spec_of("preflight"),
    message:
        line_of("preflight/{wildcards.name}")
    shell:
        "python -m snaketune preflight {input.job:q} 2>&1 | tee {log:q}"
