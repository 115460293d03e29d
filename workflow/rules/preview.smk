"""What the files of all corpora hold, as the model would see it: `snakemake preview`, before anything is made."""

from snaketune.preview.corpora import corpora_of


def previewed_corpora(wildcards):
    """What a preview looks at. By a function, since braces in a config are no wildcards."""
    return corpora_of(graph)


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
        corpora=previewed_corpora,
    shell:
        "python -m snaketune preview --corpora {params.corpora:q} --html {output:q} 2>&1 | tee {log:q}"
