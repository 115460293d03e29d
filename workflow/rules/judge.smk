rule judge:
    """Score the responses of a sample by a judge: a model of the config, or one of a server."""
    input:
        unpack(inputs_of("judge")),
    output:
        manifest="results/judge/{name}/manifest.json",
        payload=directory("results/judge/{name}/scores"),
        run="results/judge/{name}/run.json",
    log:
        "results/logs/judge/{name}.log",
    group:
        group_of("judge")
    conda:
        "../../envs/eval.yaml"
    threads: threads_of("judge")
    resources:
        **resources_of("judge"),
    params:
        spec=spec_of("judge"),
    message:
        line_of("judge/{wildcards.name}")
    shell:
        "python -m snaketune judge {input.job:q} 2>&1 | tee {log:q}"
