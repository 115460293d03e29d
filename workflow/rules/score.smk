rule score:
    """Score the responses of a sample: by their answers, by a function of the user's, or a sum of scores."""
    input:
        unpack(inputs_of("score")),
    output:
        manifest="results/score/{name}/manifest.json",
        payload=directory("results/score/{name}/scores"),
        run="results/score/{name}/run.json",
    log:
        "results/logs/score/{name}.log",
    group:
        group_of("score")
    conda:
        "../../envs/data.yaml"
    threads: threads_of("score")
    resources:
        **resources_of("score"),
    params:
        spec=spec_of("score"),
    message:
        line_of("score/{wildcards.name}")
    shell:
        "python -m snaketune score {input.job:q} 2>&1 | tee {log:q}"
