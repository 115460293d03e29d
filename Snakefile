"""The workflow is in workflow/Snakefile. This file exists because Snakemake looks for profiles/default beside it."""


include: "workflow/Snakefile"


# Rules of an included file don't become the default target. In a module, the rule may be renamed or left out.
if workflow.is_rule(rules.all.rule.name):
    workflow.default_target = rules.all.rule.name
