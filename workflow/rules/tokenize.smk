"""One part of a corpus to token ids and where they are supervised; the parts of a corpus run side by side."""


rule tokenize:
    input:
        unpack(inputs_of("tokenize")),
    output:
        **outputs_of("tokenize"),
    log:
        log_of("tokenize"),
    group:
        group_of("tokenize")
    conda:
        "../../envs/data.yaml"
    threads: threads_of("tokenize")
    resources:
        **resources_of("tokenize"),
    params:
        **params_of("tokenize"),
    shell:
        command_of("tokenize")
