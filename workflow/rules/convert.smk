"""A trained model as one GGUF file, by llama.cpp's own converter; `snakemake gguf` makes those that the config names."""


rule convert:
    input:
        unpack(inputs_of("convert")),
    output:
        **outputs_of("convert"),
    log:
        log_of("convert"),
    conda:
        "../../envs/train.yaml"
    threads: threads_of("convert")
    resources:
        **resources_of("convert"),
    params:
        **params_of("convert"),
    shell:
        command_of("convert")


rule gguf:
    input:
        gguf_files,
