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
    threads: 8
    resources:
        **operation_of("dpo"),
        mem_mb=64000,
        runtime=2880,
    params:
        **params_of("dpo"),
    shell:
        command_of("dpo")
