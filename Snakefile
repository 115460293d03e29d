"""snaketune: corpus → tokenizer → tokenize → plan → write → pack → sft → ref_logps → dpo → eval → report.

Look before you leap:   snakemake preview; snakemake -n
Run:                    snakemake
Another config:         snakemake --configfile config/recipes/tiny-23m.yaml
"""

from snakemake.utils import min_version

min_version("9.27")


# Before Snakemake reads a config, or, where it was given on the command line, before anything is made of it.
include: "workflow/rules/checked.smk"


# A config given on the command line stands alone: merged with the default one, it would also run the default's stages.
if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/platforms.smk"
include: "workflow/rules/resources.smk"


container: image()


include: "workflow/rules/clean.smk"
include: "workflow/rules/accept.smk"
include: "workflow/rules/push.smk"
include: "workflow/rules/preview.smk"


# One file for each, in the order of the first line.
for stage in STAGES:

    include: f"workflow/rules/{stage}.smk"


rule all:
    default_target: True
    input:
        rules.report.output,
        all_results,


# Snakemake decides by times, and jobs below one that runs only by inputs that it updates: what it left out is named.
onsuccess:
    log_left_out()
