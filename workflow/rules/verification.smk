rule verification:
    """Check a finished training: each check computes something in another way and compares."""
    input:
        unpack(inputs_of("verification")),
    output:
        manifest="results/verification/{name}/manifest.json",
        payload=directory("results/verification/{name}/checks"),
        run="results/verification/{name}/run.json",
    log:
        "results/logs/verification/{name}.log",
    group:
        group_of("verification")
    conda:
        "../../envs/train.yaml"
    threads: threads_of("verification")
    resources:
        **resources_of("verification"),
    params:
        spec=spec_of("verification"),
    message:
        line_of("verification/{wildcards.name}")
    shell:
        "python -m snaketune verification {input.job:q} 2>&1 | tee {log:q}"
