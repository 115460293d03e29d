"""The map is workflow/Snakefile. Snakemake looks for profiles/default beside this file."""


include: "workflow/Snakefile"


# An included file doesn't choose what is made by default. In a module, the rule may have another name, or be left out.
if workflow.is_rule(rules.all.rule.name):
    workflow.default_target = rules.all.rule.name
