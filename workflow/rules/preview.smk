from snaketune.preview.config_corpora import corpora_of


rule preview:
    """Preview the files of all corpora as the model would see them; runs whenever it is the target, as it has no output."""
    input:
        lambda wildcards: [file for job in graph.stage("corpus") for file in job.files["files"]],
    log:
        "results/logs/preview.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    params:
        # A function, so that Snakemake doesn't take braces in a config for wildcards.
        corpora=lambda wildcards: corpora_of(graph),
    shell:
        "python -m snaketune preview --corpora {params.corpora:q} --html results/preview/preview.html 2>&1 | tee {log:q}"
