"""A vocabulary trained on the corpora, or adopted from a base model."""


rule tokenizer:
    input:
        unpack(inputs_of("tokenizer")),
    output:
        **outputs_of("tokenizer"),
    log:
        log_of("tokenizer"),
    conda:
        "../../envs/data.yaml"
    threads: 4
    resources:
        **operation_of("tokenizer"),
        mem_mb=16000,
        runtime=240,
    params:
        **params_of("tokenizer"),
    shell:
        command_of("tokenizer")
