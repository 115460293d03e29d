"""Raw files to canonical rows: cleaned, deduplicated, split by prompt."""


rule corpus:
    input:
        unpack(inputs_of("corpus")),
    output:
        **outputs_of("corpus"),
    log:
        log_of("corpus"),
    group:
        group_of("corpus")
    conda:
        "../../envs/data.yaml"
    threads: threads_of("corpus")
    resources:
        **resources_of("corpus"),
    params:
        **params_of("corpus"),
    shell:
        command_of("corpus")
