rule tokenize:
    """Convert one part of a corpus to token ids and loss masks; the parts run in parallel."""
    input:
        unpack(inputs_of("tokenize")),
    output:
        manifest="results/tokenize/{name}/{part}/manifest.json",
        payload=directory("results/tokenize/{name}/{part}/tokens"),
        run="results/tokenize/{name}/{part}/run.json",
    log:
        "results/logs/tokenize/{name}/{part}.log",
    group:
        group_of("tokenize")
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **resources_of("tokenize"),
    params:
        spec=spec_of("tokenize"),
    message:
        line_of("tokenize/{wildcards.name}/{wildcards.part}")
    shell:
        "python -m snaketune tokenize {input.job:q} 2>&1 | tee {log:q}"
