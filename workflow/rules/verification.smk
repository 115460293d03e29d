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


rule verify:
    """Print the checks of all finished trainings, and end with an error if one of them failed."""
    input:
        results_of("verification", key="sft"),
    log:
        "results/logs/verify.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    params:
        manifests=lambda wildcards: [job.manifest for job in adapter.graph.stage("verification")],
    shell:
        "python -m snaketune verify {params.manifests:q} 2>&1 | tee {log:q}"
