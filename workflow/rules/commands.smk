"""Targets that make no results: previews, uploads, and the care of work folders and of the code of results."""

import json

from snaketune.preview.config_corpora import corpora_of
from snaketune.publishing.push import as_json


rule preview:
    """Preview the files of all corpora as the model would see them; runs whenever it is the target, as it has no output."""
    input:
        adapter.previewed,
    log:
        "results/logs/preview.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    params:
        # A function, so that Snakemake doesn't take braces in a config for wildcards.
        corpora=lambda wildcards: corpora_of(adapter.graph),
    shell:
        "python -m snaketune preview --corpora {params.corpora:q} --html results/preview/preview.html 2>&1 | tee {log:q}"


rule smoke:
    """Run the whole config on a few rows with small models, below results/smoke; docs/diagnosing.md says what that shows."""
    log:
        "results/logs/smoke.log",
    localrule: True
    conda:
        "../../envs/train.yaml"
    params:
        config=lambda wildcards: json.dumps(config),
        snakefile=workflow.main_snakefile,
    shell:
        "(python -m snaketune smoke results/smoke --config {params.config:q} && "
        "snakemake --snakefile {params.snakefile:q} --directory results/smoke --configfile $PWD/results/smoke/config.json "
        "--cores all && python -m snaketune smoke results/smoke) 2>&1 | tee {log:q}"


rule push:
    """Upload models to the Hub, each with its card; runs only as the target `snakemake push`."""
    input:
        adapter.pushed,
    log:
        "results/logs/push.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    params:
        models=as_json(adapter.graph.config.push),
    shell:
        "python -m snaketune push --models {params.models:q} 2>&1 | tee {log:q}"


rule clean_work:
    """Remove old work folders, and print what that frees; those that current results came from are retained. Results that the
    config doesn't name are listed."""
    log:
        "results/logs/clean_work.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    params:
        config=lambda wildcards: json.dumps(config),
    shell:
        "python -m snaketune clean --remove --config {params.config:q} 2>&1 | tee {log:q}"


rule accept_code:
    """Accept a change of code that changes no result: existing results count as made with the current code."""
    log:
        "results/logs/accept_code.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    shell:
        "python -m snaketune accept 2>&1 | tee {log:q}"


rule verify:
    """Print the checks of all finished trainings, and end with an error if one of them failed."""
    input:
        results_of("verification", key="sft"),
    log:
        "results/logs/verify.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    params:
        manifests=lambda wildcards: [job.manifest for job in adapter.graph.stage("verification")],
    shell:
        "python -m snaketune verify {params.manifests:q} 2>&1 | tee {log:q}"


rule replay:
    """Print how the replays of all finished trainings compare with their records, and end with an error if one differs."""
    input:
        results_of("reproduction", key="sft"),
    log:
        "results/logs/replay.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    params:
        manifests=lambda wildcards: [job.manifest for job in adapter.graph.stage("reproduction")],
    shell:
        "python -m snaketune verify {params.manifests:q} 2>&1 | tee {log:q}"
