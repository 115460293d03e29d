rule clean_work:
    """Old work: `snakemake clean_work` says what it frees, frees it, and keeps what a current result came from."""
    log:
        "results/logs/clean_work.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    shell:
        "python -m snaketune clean --remove 2>&1 | tee {log:q}"
