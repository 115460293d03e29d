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
        **resources_of("sft"),
    params:
        spec=spec_of("sft"),
    message:
        line_of("sft/{wildcards.name}")
    shell:
        "trap '' TERM; python -m snaketune sft {input.job:q} 2>&1 | (trap '' INT HUP; tee {log:q})"
