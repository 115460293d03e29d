rule sample:
    """Join the parts of a sample to one table of responses, with reasoning and tool calls apart."""
    input:
        unpack(inputs_of("sample")),
    output:
        manifest="results/sample/{name}/manifest.json",
        payload=directory("results/sample/{name}/responses"),
        run="results/sample/{name}/run.json",
    log:
        "results/logs/sample/{name}.log",
    group:
        group_of("sample")
    conda:
        "../../envs/eval.yaml"
    threads: threads_of("sample")
    resources:
        **resources_of("sample"),
    params:
        spec=spec_of("sample"),
    message:
        line_of("sample/{wildcards.name}")
    shell:
        "python -m snaketune sample {input.job:q} 2>&1 | tee {log:q}"
