rule reproduction:
    """Replay the first steps of a finished training, and compare their log lines and weights with the record."""
    input:
        unpack(inputs_of("reproduction")),
    output:
        manifest="results/reproduction/{name}/manifest.json",
        payload=directory("results/reproduction/{name}/checks"),
        run="results/reproduction/{name}/run.json",
    log:
        "results/logs/reproduction/{name}.log",
    group:
        group_of("reproduction")
    conda:
        "../../envs/train.yaml"
    threads: threads_of("reproduction")
    resources:
        **resources_of("reproduction"),
    params:
        spec=spec_of("reproduction"),
    message:
        line_of("reproduction/{wildcards.name}")
    shell:
        "python -m snaketune reproduction {input.job:q} 2>&1 | tee {log:q}"
