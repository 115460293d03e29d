"""Log-probabilities of all pairs under the SFT model, shared by every DPO run from it."""


rule ref_logps:
    input:
        unpack(inputs_of("ref_logps")),
    output:
        **outputs_of("ref_logps"),
    log:
        log_of("ref_logps"),
    group:
        group_of("ref_logps")
    conda:
        "../../envs/train.yaml"
    threads: threads_of("ref_logps")
    resources:
        **resources_of("ref_logps"),
    params:
        **params_of("ref_logps"),
    shell:
        command_of("ref_logps")
