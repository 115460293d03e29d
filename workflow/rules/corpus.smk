"""Raw files to canonical rows: cleaned, deduplicated, split by prompt."""


rule corpus:
    input:
        unpack(inputs_of("corpus")),
    output:
        manifest="results/corpus/{name}/manifest.json",
        payload=directory("results/corpus/{name}/rows"),
        run="results/corpus/{name}/run.json",
    log:
        "results/logs/corpus/{name}.log",
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=120,
        gpu=0,
    params:
        spec=spec_of("corpus"),
        code=code_of("corpus"),
        reruns_on=reruns_on("corpus"),
    shell:
        "OMP_NUM_THREADS={threads} python -m snaketune corpus --spec {params.spec:q} --code {params.code} --reruns-on {params.reruns_on}"
        " --files {input.files:q} --against {input.against:q} --against-files {input.against_files:q}"
        " --out $(dirname {output.manifest:q}) 2>&1 | tee {log:q}"
