rule prompts:
    """Choose and encode the prompts of a sample, and check that they fit into the model."""
    input:
        unpack(inputs_of("prompts")),
    output:
        manifest="results/prompts/{name}/manifest.json",
        payload=directory("results/prompts/{name}/rows"),
        run="results/prompts/{name}/run.json",
    log:
        "results/logs/prompts/{name}.log",
    group:
        group_of("prompts")
    conda:
        "../../envs/eval.yaml"
    threads: threads_of("prompts")
    resources:
        **resources_of("prompts"),
    params:
        spec=spec_of("prompts"),
    message:
        line_of("prompts/{wildcards.name}")
    shell:
        "python -m snaketune prompts {input.job:q} 2>&1 | tee {log:q}"
