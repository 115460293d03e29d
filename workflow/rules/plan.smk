"""Which sequence goes into which row, from their lengths alone."""


rule plan:
    input:
        unpack(inputs_of("plan")),
    output:
        **outputs_of("plan"),
    log:
        log_of("plan"),
    group:
        group_of("plan")
    conda:
        "../../envs/data.yaml"
    threads: threads_of("plan")
    resources:
        **resources_of("plan"),
    params:
        **params_of("plan"),
    shell:
        command_of("plan")
