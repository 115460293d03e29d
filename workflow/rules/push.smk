"""Models to the Hub, each with its card: `snakemake push`, and nothing else."""


rule push:
    input:
        unpack(pushed),
    log:
        "results/logs/push.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    params:
        models=push_spec(),
    shell:
        "python -m snaketune push --models {params.models:q} 2>&1 | tee {log:q}"
