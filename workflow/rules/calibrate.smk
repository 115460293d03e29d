rule calibrate:
    """In which micro-batches a training is fastest on this device."""
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
        **cluster_resources_of("calibrate"),
        mem_mb=resource_of("calibrate", "mem_mb"),
        runtime=resource_of("calibrate", "runtime"),
        gpu=resource_of("calibrate", "gpu"),
    shell:
        "trap '' TERM; python -m snaketune calibrate {input.job:q} 2>&1 | tee {log:q}"


rule calibrations:
    """In which micro-batches each training is fastest on this device."""
    input:
        results_of("calibrate"),
