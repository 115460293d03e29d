"""Figures and tables of everything that ran, as pages, and in `snakemake --report results/report.html`."""


rule report:
    input:
        unpack(report_inputs),
    output:
        manifest="results/report/manifest.json",
        run="results/report/run.json",
        pages=[
            report(
                f"results/report/pages/{page}",
                caption=f"../report/{caption}.rst",
                category=category,
                labels={"page": page},
            )
            for page, (category, caption) in pages_of(graph).items()
        ],
        **link_to_best(),
    log:
        log_of("report"),
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **operation_of("report"),
        mem_mb=4000,
        runtime=30,
    params:
        **params_of("report"),
    shell:
        command_of("report")
