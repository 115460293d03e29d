from snaketune.preview.config_corpora import corpora_of


rule preview:
    """What the files of all corpora hold, as the model would see it; made whenever it is the target, since it has no output."""
    input:
        lambda wildcards: [file for job in graph.stage("corpus") for file in job.files["files"]],
    log:
        "results/logs/preview.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    params:
        # By a function: braces in a config are no wildcards.
        corpora=lambda wildcards: corpora_of(graph),
    shell:
        "python -m snaketune preview --corpora {params.corpora:q} --html results/preview/preview.html 2>&1 | tee {log:q}"
