rule dpo:
    """Train by direct preference optimization (DPO)."""
    input:
        unpack(inputs_of("dpo")),
    output:
        manifest="results/dpo/{name}/manifest.json",
        payload=directory("results/dpo/{name}/model"),
        run="results/dpo/{name}/run.json",
    log:
        "results/logs/dpo/{name}.log",
    group:
        group_of("dpo")
    conda:
        "../../envs/train.yaml"
    threads: threads_of("dpo")
    resources:
        **cluster_resources_of("dpo"),
        mem_mb=resource_of("dpo", "mem_mb"),
        runtime=resource_of("dpo", "runtime"),
        gpu=resource_of("dpo", "gpu"),
    shell:
        "trap '' TERM; python -m snaketune dpo {input.job:q} 2>&1 | tee {log:q}"
