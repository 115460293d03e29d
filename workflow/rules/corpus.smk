rule corpus:
    """Convert raw files to canonical rows: cleaned, deduplicated, split by prompt; or link what parts of them made."""
    input:
        unpack(inputs_of("corpus")),
    output:
        manifest="results/corpus/{name}/manifest.json",
        payload=directory("results/corpus/{name}/rows"),
        run="results/corpus/{name}/run.json",
    log:
        "results/logs/corpus/{name}.log",
    group:
        group_of("corpus")
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **resources_of("corpus"),
    params:
        spec=spec_of("corpus"),
    message:
        line_of("corpus/{wildcards.name}")
    shell:
        "python -m snaketune corpus {input.job:q} 2>&1 | tee {log:q}"
