rule audit:
    """A run's step by its parts beside the limits of the hardware, with what would make it faster."""
    input:
        unpack(inputs_of("audit")),
    output:
        manifest="results/audit/{name}/manifest.json",
        payload=directory("results/audit/{name}/audit"),
        run="results/audit/{name}/run.json",
    log:
        "results/logs/audit/{name}.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **cluster_resources_of("audit"),
        mem_mb=resource_of("audit", "mem_mb"),
        runtime=resource_of("audit", "runtime"),
        gpu=resource_of("audit", "gpu"),
    shell:
        "python -m snaketune audit {input.job:q} 2>&1 | tee {log:q}"


rule doctor:
    """What holds each run back, and what would help."""
    input:
        results_of("audit"),
