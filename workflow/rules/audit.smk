rule audit:
    """Measure the parts of a run's step, compare them with the limits of the hardware, and list what would make it faster."""
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
        **resources_of("audit"),
    shell:
        "python -m snaketune audit {input.job:q} 2>&1 | tee {log:q}"


rule doctor:
    """Report what limits the speed of each run, and what would help."""
    input:
        results_of("audit"),
