"""One part of the shards, from the plan; the parts run side by side."""


rule write:
    input:
        unpack(inputs_of("write")),
    output:
        **outputs_of("write"),
    log:
        log_of("write"),
    group:
        group_of("write")
    conda:
        "../../envs/data.yaml"
    threads: threads_of("write")
    resources:
        **resources_of("write"),
    params:
        **params_of("write"),
    shell:
        command_of("write")
