rule accept_code:
    """Accept a change of code that changes no result: existing results count as made with the current code."""
    log:
        "results/logs/accept_code.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    shell:
        "python -m snaketune accept 2>&1 | tee {log:q}"
