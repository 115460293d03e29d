rule race:
    """Compare the variants of a grid, and pause those that are clearly worse than others."""
    input:
        unpack(inputs_of("race")),
    output:
        manifest="results/race/{name}/manifest.json",
        payload=directory("results/race/{name}/decisions"),
        run="results/race/{name}/run.json",
    log:
        "results/logs/race/{name}.log",
    group:
        group_of("race")
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **resources_of("race"),
    params:
        spec=spec_of("race"),
    message:
        line_of("race/{wildcards.name}")
    shell:
        "python -m snaketune race {input.job:q} 2>&1 | tee {log:q}"
