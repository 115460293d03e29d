"""What holds a run back, and what would help; `snakemake doctor` looks at all runs of a config."""


rule audit:
    input:
        unpack(inputs_of("audit")),
    output:
        manifest="results/audit/{name}/manifest.json",
        payload=directory("results/audit/{name}/audit"),
        run="results/audit/{name}/run.json",
    log:
        "results/logs/audit/{name}.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **resources_of("audit"),
    shell:
        "python -m snaketune audit {input.job:q} 2>&1 | tee {log:q}"


rule doctor:
    input:
        results_of("audit"),
