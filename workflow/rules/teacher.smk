rule teacher:
    """Compute the most likely tokens of a teacher for the rows of a pack, for every run that is distilled on them."""
    input:
        unpack(inputs_of("teacher")),
    output:
        manifest="results/teacher/{name}/manifest.json",
        payload=directory("results/teacher/{name}/tokens"),
        run="results/teacher/{name}/run.json",
    log:
        "results/logs/teacher/{name}.log",
    group:
        group_of("teacher")
    conda:
        "../../envs/train.yaml"
    threads: threads_of("teacher")
    resources:
        **resources_of("teacher"),
    params:
        spec=spec_of("teacher"),
    message:
        line_of("teacher/{wildcards.name}")
    shell:
        "python -m snaketune teacher {input.job:q} 2>&1 | tee {log:q}"
