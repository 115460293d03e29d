"""A short training of a diagnosis, timed."""


rule trial:
    input:
        unpack(inputs_of("trial")),
    output:
        **outputs_of("trial"),
    log:
        log_of("trial"),
    conda:
        "../../envs/train.yaml"
    threads: threads_of("trial")
    resources:
        **resources_of("trial"),
    params:
        **params_of("trial"),
    shell:
        command_of("trial")
