"""Rows to packed Arrow shards (manifest v3.0)."""


rule pack:
    input:
        unpack(inputs_of("pack")),
    output:
        manifest="results/pack/{name}/manifest.json",
        payload=directory("results/pack/{name}/shards"),
        run="results/pack/{name}/run.json",
    log:
        "results/logs/pack/{name}.log",
    conda:
        "../../envs/data.yaml"
    threads: 4
    resources:
        mem_mb=16000,
        runtime=240,
        gpu=0,
    params:
        spec=spec_of("pack"),
        code=code_of("pack"),
    shell:
        "OMP_NUM_THREADS={threads} python -m snaketune pack --spec {params.spec:q} --code {params.code}"
        " --corpus {input.corpus:q} --tokenizer {input.tokenizer:q}"
        " --out $(dirname {output.manifest:q}) 2>&1 | tee {log:q}"
