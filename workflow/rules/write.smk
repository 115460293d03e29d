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
        **cluster_resources_of("write"),
        mem_mb=resource_of("write", "mem_mb"),
        runtime=resource_of("write", "runtime"),
        gpu=resource_of("write", "gpu"),
    shell:
        "python -m snaketune write {input.job:q} 2>&1 | tee {log:q}"
