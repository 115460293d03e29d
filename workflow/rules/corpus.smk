"""Raw files to canonical rows: cleaned, deduplicated, split by prompt."""


rule corpus:
    input:
        unpack(inputs_of("corpus")),
    output:
        **outputs_of("corpus"),
    log:
        log_of("corpus"),
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **operation_of("corpus"),
        mem_mb=4000,
        runtime=120,
    params:
        **params_of("corpus"),
    shell:
        command_of("corpus")
