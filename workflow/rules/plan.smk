"""Which sequence goes into which row, from their lengths alone."""


rule plan:
    input:
        unpack(inputs_of("plan")),
    output:
        **outputs_of("plan"),
    log:
        log_of("plan"),
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **operation_of("plan"),
        mem_mb=3000,
        runtime=60,
    params:
        **params_of("plan"),
    shell:
        command_of("plan")
