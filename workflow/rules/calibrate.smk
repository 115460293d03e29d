rule calibrate:
    """Find the micro-batch with which a training is fastest on this device."""
    input:
        unpack(inputs_of("calibrate")),
    output:
        manifest="results/calibrate/{name}/manifest.json",
        payload=directory("results/calibrate/{name}/curve"),
        run="results/calibrate/{name}/run.json",
    log:
        "results/logs/calibrate/{name}.log",
    group:
        group_of("calibrate")
    conda:
        "../../envs/train.yaml"
    threads: threads_of("calibrate")
    resources:
        **resources_of("calibrate"),
    params:
        spec=spec_of("calibrate"),
    message:
        line_of("calibrate/{wildcards.name}")
    shell:
        "trap '' TERM; python -m snaketune calibrate {input.job:q} 2>&1 | (trap '' INT HUP; tee {log:q})"


rule calibrations:
    """Find for each training the micro-batch with which it is fastest on this device."""
    input:
        results_of("calibrate"),
