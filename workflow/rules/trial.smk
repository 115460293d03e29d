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
    group:
        group_of("trial")
    conda:
        "../../envs/train.yaml"
    threads: threads_of("trial")
    resources:
        **resources_of("trial"),
    shell:
        "trap '' TERM; python -m snaketune trial {input.job:q} 2>&1 | tee {log:q}"
