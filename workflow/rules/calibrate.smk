"""In which portions a training is fastest on the device; `snakemake calibrations` measures that of every training."""


rule calibrate:
    input:
        unpack(inputs_of("calibrate")),
    output:
        **outputs_of("calibrate"),
    log:
        log_of("calibrate"),
    conda:
        "../../envs/train.yaml"
    threads: threads_of("calibrate")
    resources:
        **resources_of("calibrate"),
    params:
        **params_of("calibrate"),
    shell:
        command_of("calibrate")


rule calibrations:
    input:
        calibrations,
