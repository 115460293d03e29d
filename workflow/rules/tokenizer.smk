"""A vocabulary trained on the corpora, or adopted from a base model."""


rule tokenizer:
    input:
        unpack(inputs_of("tokenizer")),
    output:
        **outputs_of("tokenizer"),
    log:
        log_of("tokenizer"),
    group:
        group_of("tokenizer")
    conda:
        "../../envs/data.yaml"
    threads: threads_of("tokenizer")
    resources:
        **resources_of("tokenizer"),
    params:
        **params_of("tokenizer"),
    shell:
        command_of("tokenizer")
