"""Direct preference optimization."""


rule dpo:
    input:
        unpack(inputs_of("dpo")),
    output:
        **outputs_of("dpo"),
    log:
        log_of("dpo"),
    conda:
        "../../envs/train.yaml"
    threads: for_each_process("dpo", 8)
    resources:
        **operation_of("dpo"),
        mem_mb=for_each_process("dpo", 64000),
        runtime=2880,
    params:
        **params_of("dpo"),
    shell:
        command_of("dpo")
