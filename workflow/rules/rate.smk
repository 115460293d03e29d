rule rate:
    """Score the responses of a sample by a reward model."""
    input:
        unpack(inputs_of("rate")),
    output:
        manifest="results/rate/{name}/manifest.json",
        payload=directory("results/rate/{name}/scores"),
        run="results/rate/{name}/run.json",
    log:
        "results/logs/rate/{name}.log",
    group:
        group_of("rate")
    conda:
        "../../envs/eval.yaml"
    threads: threads_of("rate")
    resources:
        **resources_of("rate"),
    params:
        spec=spec_of("rate"),
    message:
        line_of("rate/{wildcards.name}")
    shell:
        "python -m snaketune rate {input.job:q} 2>&1 | tee {log:q}"
