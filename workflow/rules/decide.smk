rule decide:
    """Decide which rows of a corpus in parts are used: duplicates, near duplicates, split, contamination, caps, weights."""
    input:
        unpack(inputs_of("decide")),
    output:
        manifest="results/decide/{name}/manifest.json",
        payload=directory("results/decide/{name}/decisions"),
        run="results/decide/{name}/run.json",
    log:
        "results/logs/decide/{name}.log",
    group:
        group_of("decide")
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **resources_of("decide"),
    params:
        spec=spec_of("decide"),
    message:
        line_of("decide/{wildcards.name}")
    shell:
        "python -m snaketune decide {input.job:q} 2>&1 | tee {log:q}"
