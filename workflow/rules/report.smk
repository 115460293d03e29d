from snaketune.report.pages import judging_files, pages_of


rule report:
    """Write the report on all results, as pages and for `snakemake --report results/report.html`."""
    input:
        unpack(inputs_of("report")),
    output:
        **adapter.link_to_best(),
        manifest="results/report/manifest.json",
        run="results/report/run.json",
        pages=[
            report(
                f"results/report/pages/{page}",
                caption=f"../report/{caption}.rst",
                category=category,
                labels={"page": page},
            )
            for page, (category, caption) in pages_of(adapter.graph).items()
        ],
        judged=[f"results/report/pages/{name}" for name in judging_files(adapter.graph)],
    log:
        "results/logs/report.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **resources_of("report"),
    params:
        spec=spec_of("report"),
    message:
        line_of("report")
    shell:
        "python -m snaketune report {input.job:q} 2>&1 | tee {log:q}"
