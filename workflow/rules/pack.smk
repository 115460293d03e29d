rule pack:
    """Join all parts of the packed Arrow shards (manifest v3.0) in one artifact, by hard link."""
    input:
        unpack(inputs_of("pack")),
    output:
        manifest="results/pack/{name}/manifest.json",
        payload=directory("results/pack/{name}/shards"),
        run="results/pack/{name}/run.json",
    log:
        "results/logs/pack/{name}.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **resources_of("pack"),
    params:
        spec=spec_of("pack"),
    message:
        line_of("pack/{wildcards.name}")
    shell:
        "python -m snaketune pack {input.job:q} 2>&1 | tee {log:q}"
