"""Supervised fine-tuning."""


rule sft:
    input:
        unpack(inputs_of("sft")),
    output:
        **outputs_of("sft"),
    log:
        log_of("sft"),
    group:
        group_of("sft")
    conda:
        "../../envs/train.yaml"
    threads: threads_of("sft")
    resources:
        **resources_of("sft"),
    params:
        **params_of("sft"),
    shell:
        command_of("sft")
