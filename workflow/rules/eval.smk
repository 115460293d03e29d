"""One model on the held-out rows: loss, exact match, preference accuracy, tasks, samples."""


rule eval:
    input:
        unpack(inputs_of("eval")),
    output:
        **outputs_of("eval"),
    log:
        log_of("eval"),
    group:
        group_of("eval")
    conda:
        "../../envs/eval.yaml"
    threads: threads_of("eval")
    resources:
        **resources_of("eval"),
    params:
        **params_of("eval"),
    shell:
        command_of("eval")
