rule merge:
    """Average the weights of trained models."""
    input:
        unpack(inputs_of("merge")),
    output:
        manifest="results/merge/{name}/manifest.json",
        payload=directory("results/merge/{name}/model"),
        run="results/merge/{name}/run.json",
    log:
        "results/logs/merge/{name}.log",
    group:
        group_of("merge")
    conda:
        "../../envs/train.yaml"
    threads: 1
    resources:
        **resources_of("merge"),
    params:
        spec=spec_of("merge"),
    message:
        line_of("merge/{wildcards.name}")
    shell:
        "python -m snaketune merge {input.job:q} 2>&1 | tee {log:q}"
