"""One part of the shards, from the plan; the parts run side by side."""


rule write:
    input:
        unpack(inputs_of("write")),
    output:
        manifest="results/write/{name}/{part}/manifest.json",
        payload=directory("results/write/{name}/{part}/shards"),
        run="results/write/{name}/{part}/run.json",
    log:
        "results/logs/write/{name}/{part}.log",
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        mem_mb=3000,
        runtime=240,
        gpu=0,
    params:
        spec=spec_of("write"),
        code=code_of("write"),
        reruns_on=reruns_on("write"),
    shell:
        "OMP_NUM_THREADS={threads} python -m snaketune write --spec {params.spec:q} --code {params.code} --reruns-on {params.reruns_on}"
        " --plan {input.plan:q} --tokens {input.tokens:q} --corpus {input.corpus:q}"
        " --out $(dirname {output.manifest:q}) 2>&1 | tee {log:q}"
