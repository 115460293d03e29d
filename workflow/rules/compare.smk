rule compare:
    """Compare a model's responses with another one's by a judge."""
    input:
        unpack(inputs_of("compare")),
    output:
        manifest="results/compare/{evaluation}/{model}/manifest.json",
        payload=directory("results/compare/{evaluation}/{model}/verdicts"),
        run="results/compare/{evaluation}/{model}/run.json",
    log:
        "results/logs/compare/{evaluation}/{model}.log",
    group:
        group_of("compare")
    conda:
        "../../envs/eval.yaml"
    threads: threads_of("compare")
    resources:
        **resources_of("compare"),
    params:
        spec=spec_of("compare"),
    message:
        line_of("compare/{wildcards.evaluation}/{wildcards.model}")
    shell:
        "python -m snaketune compare {input.job:q} 2>&1 | tee {log:q}"
