rule write:
    """Write one part of the shards, from the plan; the parts run in parallel."""
    input:
        unpack(inputs_of("write")),
    output:
        manifest="results/write/{name}/{part}/manifest.json",
        payload=directory("results/write/{name}/{part}/shards"),
        run="results/write/{name}/{part}/run.json",
    log:
        "results/logs/write/{name}/{part}.log",
    group:
        group_of("write")
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **resources_of("write"),
    params:
        spec=spec_of("write"),
    message:
        line_of("write/{wildcards.name}/{wildcards.part}")
    shell:
        "python -m snaketune write {input.job:q} 2>&1 | tee {log:q}"
