"""Supervised fine-tuning."""


rule sft:
    input:
        unpack(inputs_of("sft")),
    output:
        **outputs_of("sft"),
    log:
        log_of("sft"),
    conda:
        "../../envs/train.yaml"
    threads: for_each_process("sft", 8)
    resources:
        **operation_of("sft"),
        mem_mb=for_each_process("sft", 64000),
        runtime=2880,
    params:
        **params_of("sft"),
    shell:
        command_of("sft")
