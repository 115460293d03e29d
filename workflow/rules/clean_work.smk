rule clean_work:
    """Remove old work folders, and print what that frees; those that current results came from are retained."""
    log:
        "results/logs/clean_work.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    shell:
        "python -m snaketune clean --remove 2>&1 | tee {log:q}"
