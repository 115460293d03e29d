"""In which portions a training is fastest on the device; `snakemake calibrations` measures that of every training."""


rule calibrate:
    input:
        unpack(inputs_of("calibrate")),
    output:
        manifest="results/calibrate/{name}/manifest.json",
        payload=directory("results/calibrate/{name}/curve"),
        run="results/calibrate/{name}/run.json",
    log:
        "results/logs/calibrate/{name}.log",
    conda:
        "../../envs/train.yaml"
    threads: threads_of("calibrate")
    resources:
        **resources_of("calibrate"),
    shell:
        "trap '' TERM; python -m snaketune calibrate {input.job:q} 2>&1 | tee {log:q}"


rule calibrations:
    input:
        results_of("calibrate"),
