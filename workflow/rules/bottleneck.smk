rule bottleneck:
    """Compare the timings of a run and its variants, and list what would make it faster."""
    input:
        unpack(inputs_of("bottleneck")),
    output:
        manifest="results/bottleneck/{name}/manifest.json",
        payload=directory("results/bottleneck/{name}/doctor"),
        run="results/bottleneck/{name}/run.json",
    log:
        "results/logs/bottleneck/{name}.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **resources_of("bottleneck"),
    params:
        spec=spec_of("bottleneck"),
    message:
        line_of("bottleneck/{wildcards.name}")
    shell:
        "python -m snaketune bottleneck {input.job:q} 2>&1 | tee {log:q}"


rule doctor:
    """Report what limits the speed of each run, and what would help."""
    input:
        results_of("bottleneck", key="sft"),
