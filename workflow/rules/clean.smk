"""Old work: `snakemake --cores 1 clean_work` says what it frees, frees it, and keeps what a current result came from."""


rule clean_work:
    conda:
        "../../envs/data.yaml"
    localrule: True
    log:
        "results/logs/clean_work.log",
    shell:
        "python -m snaketune clean --remove 2>&1 | tee {log:q}"
