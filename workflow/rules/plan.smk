rule plan:
    """Assign sequences to rows, from their lengths and ids."""
    input:
        unpack(inputs_of("plan")),
    output:
        manifest="results/plan/{name}/manifest.json",
        payload=directory("results/plan/{name}/plan"),
        run="results/plan/{name}/run.json",
    log:
        "results/logs/plan/{name}.log",
    group:
        group_of("plan")
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **resources_of("plan"),
    params:
        spec=spec_of("plan"),
    message:
        line_of("plan/{wildcards.name}")
    shell:
        "python -m snaketune plan {input.job:q} 2>&1 | tee {log:q}"
