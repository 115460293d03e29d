"""One part of the shards, from the plan; the parts run side by side."""


rule write:
    input:
        unpack(inputs_of("write")),
    output:
        **outputs_of("write"),
    log:
        log_of("write"),
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **operation_of("write"),
        mem_mb=3000,
        runtime=240,
    params:
        **params_of("write"),
    shell:
        command_of("write")
