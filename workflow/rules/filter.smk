rule filter:
    """Write one part of the files of a corpus, with the rows that are used; the parts run in parallel."""
    input:
        unpack(inputs_of("filter")),
    output:
        manifest="results/filter/{name}/{part}/manifest.json",
        payload=directory("results/filter/{name}/{part}/rows"),
        run="results/filter/{name}/{part}/run.json",
    log:
        "results/logs/filter/{name}/{part}.log",
    group:
        group_of("filter")
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **resources_of("filter"),
    params:
        spec=spec_of("filter"),
    message:
        line_of("filter/{wildcards.name}/{wildcards.part}")
    shell:
        "python -m snaketune filter {input.job:q} 2>&1 | tee {log:q}"
