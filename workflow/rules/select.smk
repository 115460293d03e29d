rule select:
    """Select pairs, conversations or votes for a corpus from scored responses."""
    input:
        unpack(inputs_of("select")),
    output:
        manifest="results/select/{name}/manifest.json",
        payload=directory("results/select/{name}/rows"),
        run="results/select/{name}/run.json",
    log:
        "results/logs/select/{name}.log",
    group:
        group_of("select")
    conda:
        "../../envs/data.yaml"
    threads: threads_of("select")
    resources:
        **resources_of("select"),
    params:
        spec=spec_of("select"),
    message:
        line_of("select/{wildcards.name}")
    shell:
        "python -m snaketune select {input.job:q} 2>&1 | tee {log:q}"
