"""Figures and tables of everything that ran, as pages, and in `snakemake --report results/report.html`."""


rule report:
    input:
        unpack(told_inputs("report")),
    output:
        **link_to_best(),
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
        judged=[f"results/report/pages/{name}" for name in files_to_judge(graph)],
    log:
        log_of("report"),
    localrule: True
    conda:
        "../../envs/data.yaml"
    threads: threads_of("report")
    resources:
        **resources_of("report"),
    params:
        **params_of("report"),
    shell:
        command_of("report")
