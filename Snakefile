"""The workflow is in workflow/Snakefile. This file exists because Snakemake looks for profiles/default beside it."""


include: "workflow/Snakefile"


# Rules of an included file don't become the default target.
set_default_target(workflow, rules)
