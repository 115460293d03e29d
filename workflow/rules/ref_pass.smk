rule ref_pass:
    """Compute one part of the reference's log-probabilities, if the config divides them among jobs; parts run in parallel."""
    input:
        unpack(inputs_of("ref_pass")),
    output:
        manifest="results/ref_pass/{name}/{part}/manifest.json",
        payload=directory("results/ref_pass/{name}/{part}/logps"),
        run="results/ref_pass/{name}/{part}/run.json",
    log:
        "results/logs/ref_pass/{name}/{part}.log",
    group:
        group_of("ref_pass")
    conda:
        "../../envs/train.yaml"
    threads: threads_of("ref_pass")
    resources:
        **resources_of("ref_pass"),
    params:
        spec=spec_of("ref_pass"),
    message:
        line_of("ref_pass/{wildcards.name}/{wildcards.part}")
    shell:
        "python -m snaketune ref_pass {input.job:q} 2>&1 | tee {log:q}"
