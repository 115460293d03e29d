rule ref_logps:
    """Compute the log-probabilities of all pairs under the SFT model, for every DPO run from it."""
    input:
        unpack(inputs_of("ref_logps")),
    output:
        manifest="results/ref_logps/{name}/manifest.json",
        payload=directory("results/ref_logps/{name}/logps"),
        run="results/ref_logps/{name}/run.json",
    log:
        "results/logs/ref_logps/{name}.log",
    group:
        group_of("ref_logps")
    conda:
        "../../envs/train.yaml"
    threads: threads_of("ref_logps")
    resources:
        **resources_of("ref_logps"),
    params:
        spec=spec_of("ref_logps"),
    message:
        line_of("ref_logps/{wildcards.name}")
    shell:
        "python -m snaketune ref_logps {input.job:q} 2>&1 | tee {log:q}"
