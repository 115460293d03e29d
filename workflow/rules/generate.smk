rule generate:
    """Generate the responses to one part of a sample's prompts; parts run in parallel."""
    input:
        unpack(inputs_of("generate")),
    output:
        manifest="results/generate/{name}/{part}/manifest.json",
        payload=directory("results/generate/{name}/{part}/responses"),
        run="results/generate/{name}/{part}/run.json",
    log:
        "results/logs/generate/{name}/{part}.log",
    group:
        group_of("generate")
    conda:
        "../../envs/eval.yaml"
    threads: threads_of("generate")
    resources:
        **resources_of("generate"),
    params:
        spec=spec_of("generate"),
    message:
        line_of("generate/{wildcards.name}/{wildcards.part}")
    shell:
        "python -m snaketune generate {input.job:q} 2>&1 | tee {log:q}"
