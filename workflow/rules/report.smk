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
            for page, (category, caption) in pages_of(plan).items()
        ],
    log:
        "results/logs/report.log",
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=30,
        gpu=0,
    params:
        spec=report_spec,
        code=code_of("report"),
        reruns_on=reruns_on("report"),
    shell:
        "python -m snaketune report --spec {params.spec:q} --code {params.code} --reruns-on {params.reruns_on}"
        " --manifests {input.manifests:q} --runs {input.runs:q}"
        " --out $(dirname {output.manifest:q}) 2>&1 | tee {log:q}"
