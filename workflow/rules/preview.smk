"""What the files of all corpora hold, as the model would see it: `snakemake preview`, before anything is made."""

from snaketune.preview.corpora import corpora_of


rule preview:
    input:
        previewed,
    output:
        "results/preview/preview.html",
    log:
        "results/logs/preview.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    params:
        # By a function: braces in a config are no wildcards.
        corpora=lambda wildcards: corpora_of(graph),
    shell:
        "python -m snaketune preview --corpora {params.corpora:q} --html {output:q} 2>&1 | tee {log:q}"
