"""One model on the held-out rows: loss, exact match, preference accuracy, tasks, samples."""


rule eval:
    input:
        unpack(inputs_of("eval")),
    output:
        **outputs_of("eval"),
    log:
        log_of("eval"),
    conda:
        "../../envs/eval.yaml"
    threads: 8
    resources:
        **operation_of("eval"),
        mem_mb=32000,
        runtime=480,
        nodes=1,
    params:
        **params_of("eval"),
    shell:
        command_of("eval")
