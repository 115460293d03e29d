"""Log-probabilities of all pairs under the SFT model, shared by every DPO run from it."""


rule ref_logps:
    input:
        unpack(inputs_of("ref_logps")),
    output:
        **outputs_of("ref_logps"),
    log:
        log_of("ref_logps"),
    conda:
        "../../envs/train.yaml"
    threads: 8
    resources:
        **operation_of("ref_logps"),
        mem_mb=64000,
        runtime=480,
        nodes=1,
    params:
        **params_of("ref_logps"),
    shell:
        command_of("ref_logps")
