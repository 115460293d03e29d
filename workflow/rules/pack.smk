"""Packed Arrow shards (manifest v3.0): all parts as one artifact, by hard link."""


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
    threads: 1
    resources:
        mem_mb=2000,
        runtime=60,
        gpu=0,
    params:
        spec=spec_of("pack"),
        code=code_of("pack"),
        reruns_on=reruns_on("pack"),
    shell:
        "OMP_NUM_THREADS={threads} python -m snaketune pack --spec {params.spec:q} --code {params.code} --reruns-on {params.reruns_on}"
        " --plan {input.plan:q} --shards {input.shards:q}"
        " --out $(dirname {output.manifest:q}) 2>&1 | tee {log:q}"
