"""Packed Arrow shards (manifest v3.0): all parts as one artifact, by hard link."""


rule pack:
    input:
        unpack(inputs_of("pack")),
    output:
        **outputs_of("pack"),
    log:
        log_of("pack"),
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **operation_of("pack"),
        mem_mb=2000,
        runtime=60,
    params:
        **params_of("pack"),
    shell:
        command_of("pack")
