from snaketune.publishing.push import as_json


rule push:
    """Upload models to the Hub, each with its card; runs only as the target `snakemake push`."""
    input:
        pushed,
    log:
        "results/logs/push.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    params:
        models=as_json(graph.config.push),
    shell:
        "python -m snaketune push --models {params.models:q} 2>&1 | tee {log:q}"
