"""Packed Arrow shards (manifest v3.0): all parts as one artifact, by hard link."""


rule pack:
    input:
        unpack(inputs_of("pack")),
    output:
        **outputs_of("pack"),
    log:
        log_of("pack"),
    localrule: True
    conda:
        "../../envs/data.yaml"
    threads: threads_of("pack")
    resources:
        **resources_of("pack"),
    params:
        **params_of("pack"),
    shell:
        command_of("pack")
