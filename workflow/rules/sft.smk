rule sft:
    """Train by supervised fine-tuning (SFT)."""
    input:
        unpack(inputs_of("sft")),
    output:
        manifest="results/sft/{name}/manifest.json",
        payload=directory("results/sft/{name}/model"),
        run="results/sft/{name}/run.json",
    log:
        "results/logs/sft/{name}.log",
    group:
        group_of("sft")
    conda:
        "../../envs/train.yaml"
    threads: threads_of("sft")
    resources:
        **cluster_resources_of("sft"),
        mem_mb=resource_of("sft", "mem_mb"),
        runtime=resource_of("sft", "runtime"),
        gpu=resource_of("sft", "gpu"),
    shell:
        "trap '' TERM; python -m snaketune sft {input.job:q} 2>&1 | tee {log:q}"
