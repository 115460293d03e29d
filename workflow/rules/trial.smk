rule trial:
    """Time a short training, for a diagnosis or an audit."""
    input:
        unpack(inputs_of("trial")),
    output:
        manifest="results/trial/{name}/{variant}/{repeat}/manifest.json",
        payload=directory("results/trial/{name}/{variant}/{repeat}/measured"),
        run="results/trial/{name}/{variant}/{repeat}/run.json",
    log:
        "results/logs/trial/{name}/{variant}/{repeat}.log",
    conda:
        "../../envs/train.yaml"
    threads: threads_of("trial")
    resources:
        **cluster_resources_of("trial"),
        mem_mb=resource_of("trial", "mem_mb"),
        runtime=resource_of("trial", "runtime"),
        gpu=resource_of("trial", "gpu"),
    shell:
        "trap '' TERM; python -m snaketune trial {input.job:q} 2>&1 | tee {log:q}"
