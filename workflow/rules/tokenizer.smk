rule tokenizer:
    """Train a tokenizer on the corpora, or adopt that of a base model."""
    input:
        unpack(inputs_of("tokenizer")),
    output:
        manifest="results/tokenizer/{name}/manifest.json",
        payload=directory("results/tokenizer/{name}/tokenizer"),
        run="results/tokenizer/{name}/run.json",
    log:
        "results/logs/tokenizer/{name}.log",
    group:
        group_of("tokenizer")
    conda:
        "../../envs/data.yaml"
    threads: threads_of("tokenizer")
    resources:
        **resources_of("tokenizer"),
    params:
        spec=spec_of("tokenizer"),
    message:
        line_of("tokenizer/{wildcards.name}")
    shell:
        "python -m snaketune tokenizer {input.job:q} 2>&1 | tee {log:q}"
