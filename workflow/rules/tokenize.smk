"""One part of a corpus to token ids and where they are supervised; the parts of a corpus run side by side."""


rule tokenize:
    input:
        unpack(inputs_of("tokenize")),
    output:
        **outputs_of("tokenize"),
    log:
        log_of("tokenize"),
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **operation_of("tokenize"),
        mem_mb=4000,
        runtime=240,
    params:
        **params_of("tokenize"),
    shell:
        command_of("tokenize")
