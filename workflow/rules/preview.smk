"""What the files of all corpora hold, as the model would see it: `snakemake preview`, before anything is made."""

from snaketune.preview.corpora import corpora_of


def previewed(wildcards):
    """The local files of all corpora. A preview is to be read, so it is made whenever it is a target."""
    if DECIDES:
        workflow.dag.forcefiles.add(workflow.inputfile("results/preview/preview.html"))
    return [file for job in graph.stage("corpus") for file in job.files["files"]]


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
        corpora=corpora_of(graph),
    shell:
        "python -m snaketune preview --corpora {params.corpora:q} --html {output:q} 2>&1 | tee {log:q}"
