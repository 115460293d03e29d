rule read:
    """Read one part of the raw files of a corpus: canonical rows, cleaned; the parts run in parallel."""
    input:
        unpack(inputs_of("read")),
    output:
        manifest="results/read/{name}/{part}/manifest.json",
        payload=directory("results/read/{name}/{part}/rows"),
        run="results/read/{name}/{part}/run.json",
    log:
        "results/logs/read/{name}/{part}.log",
    group:
        group_of("read")
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **resources_of("read"),
    params:
        spec=spec_of("read"),
    message:
        line_of("read/{wildcards.name}/{wildcards.part}")
    shell:
        "python -m snaketune read {input.job:q} 2>&1 | tee {log:q}"
