rule reward:
    """Train a reward model on pairs."""
    input:
        unpack(inputs_of("reward")),
    output:
        manifest="results/reward/{name}/manifest.json",
        payload=directory("results/reward/{name}/model"),
        run="results/reward/{name}/run.json",
    log:
        "results/logs/reward/{name}.log",
    group:
        group_of("reward")
    conda:
        "../../envs/train.yaml"
    threads: threads_of("reward")
    resources:
        **resources_of("reward"),
    params:
        spec=spec_of("reward"),
    message:
        line_of("reward/{wildcards.name}")
    shell:
        "trap '' TERM; python -m snaketune reward {input.job:q} 2>&1 | (trap '' INT HUP; tee {log:q})"
