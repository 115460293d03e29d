"""README.md of each trained model, as the Hub reads it."""


rule card:
    input:
        unpack(told_inputs("card")),
    output:
        **outputs_of("card"),
    log:
        log_of("card"),
    localrule: True
    conda:
        "../../envs/data.yaml"
    threads: threads_of("card")
    resources:
        **resources_of("card"),
    params:
        **params_of("card"),
    shell:
        command_of("card")
