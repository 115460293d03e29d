"""One part of the reference's log-probabilities, where a config shares them among jobs; the parts run side by side."""


rule ref_pass:
    input:
        unpack(inputs_of("ref_pass")),
    output:
        **outputs_of("ref_pass"),
    log:
        log_of("ref_pass"),
    group:
        group_of("ref_pass")
    conda:
        "../../envs/train.yaml"
    threads: threads_of("ref_pass")
    resources:
        **resources_of("ref_pass"),
    params:
        **params_of("ref_pass"),
    shell:
        command_of("ref_pass")
