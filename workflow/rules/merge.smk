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
    conda:
        "../../envs/train.yaml"
    threads: 1
    resources:
        **cluster_resources_of("merge"),
        mem_mb=resource_of("merge", "mem_mb"),
        runtime=resource_of("merge", "runtime"),
        gpu=resource_of("merge", "gpu"),
    shell:
        "python -m snaketune merge {input.job:q} 2>&1 | tee {log:q}"
