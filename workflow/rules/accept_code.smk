rule accept_code:
    """A change of code that changes no result: `snakemake accept_code` lets what is there count as made with it."""
    log:
        "results/logs/accept_code.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    shell:
        "python -m snaketune accept 2>&1 | tee {log:q}"
