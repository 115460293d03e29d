"""What holds a run back, and what would help; `snakemake doctor` looks at all runs of a config."""


rule audit:
    input:
        unpack(inputs_of("audit")),
    output:
        **outputs_of("audit"),
    log:
        log_of("audit"),
    localrule: True
    conda:
        "../../envs/data.yaml"
    threads: threads_of("audit")
    resources:
        **resources_of("audit"),
    params:
        **params_of("audit"),
    shell:
        command_of("audit")


rule doctor:
    input:
        audits,
