rule eval:
    """Evaluate a model on held-out rows: loss, exact match, preference accuracy, tasks, samples."""
    input:
        unpack(inputs_of("eval")),
    output:
        manifest="results/eval/{evaluation}/{model}/manifest.json",
        payload=directory("results/eval/{evaluation}/{model}/scores"),
        run="results/eval/{evaluation}/{model}/run.json",
    log:
        "results/logs/eval/{evaluation}/{model}.log",
    group:
        group_of("eval")
    conda:
        "../../envs/eval.yaml"
    threads: threads_of("eval")
    resources:
        **resources_of("eval"),
    params:
        spec=spec_of("eval"),
    message:
        line_of("eval/{wildcards.evaluation}/{wildcards.model}")
    shell:
        "python -m snaketune eval {input.job:q} 2>&1 | tee {log:q}"
