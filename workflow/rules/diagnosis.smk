"""What each change of a diagnosis brings; `snakemake diagnose` makes all that the config asks for."""


rule diagnosis:
    input:
        unpack(inputs_of("diagnosis")),
    output:
        **outputs_of("diagnosis"),
    log:
        log_of("diagnosis"),
    localrule: True
    conda:
        "../../envs/data.yaml"
    threads: threads_of("diagnosis")
    resources:
        **resources_of("diagnosis"),
    params:
        **params_of("diagnosis"),
    shell:
        command_of("diagnosis")


rule diagnose:
    input:
        diagnoses,
