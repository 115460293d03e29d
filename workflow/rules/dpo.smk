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
        **resources_of("dpo"),
    params:
        spec=spec_of("dpo"),
    message:
        line_of("dpo/{wildcards.name}")
    shell:
        "trap '' TERM; python -m snaketune dpo {input.job:q} 2>&1 | (trap '' INT HUP; tee {log:q})"
