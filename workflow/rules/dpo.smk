"""Direct preference optimization."""


rule dpo:
    input:
        unpack(inputs_of("dpo")),
    output:
        **outputs_of("dpo"),
    log:
        log_of("dpo"),
    group:
        group_of("dpo")
    conda:
        "../../envs/train.yaml"
    threads: threads_of("dpo")
    resources:
        **resources_of("dpo"),
    params:
        **params_of("dpo"),
    shell:
        command_of("dpo")
