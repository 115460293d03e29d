"""snaketune: corpus → tokenizer → tokenize → plan → write → pack → sft → ref_logps → dpo → eval → report.

Look before you leap:   snakemake -n
Run:                    snakemake
Another config:         snakemake --configfile config/recipes/tiny-23m.yaml
"""

from snakemake.utils import min_version

min_version("9.27")

# A config given on the command line stands alone: merged with the default one, it would also run the default's stages.
if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/corpus.smk"
include: "workflow/rules/tokenizer.smk"
include: "workflow/rules/tokenize.smk"
include: "workflow/rules/plan.smk"
include: "workflow/rules/write.smk"
include: "workflow/rules/pack.smk"
include: "workflow/rules/sft.smk"
include: "workflow/rules/ref_logps.smk"
include: "workflow/rules/dpo.smk"
include: "workflow/rules/eval.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/clean.smk"
include: "workflow/rules/accept.smk"


rule all:
    default_target: True
    input:
        all_results,
