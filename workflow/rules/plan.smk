"""Which sequence goes into which row, from their lengths alone."""


rule plan:
    input:
        unpack(inputs_of("plan")),
    output:
        manifest="results/plan/{name}/manifest.json",
        payload=directory("results/plan/{name}/plan"),
        run="results/plan/{name}/run.json",
    log:
        "results/logs/plan/{name}.log",
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        mem_mb=3000,
        runtime=60,
        gpu=0,
    params:
        spec=spec_of("plan"),
        code=code_of("plan"),
        reruns_on=reruns_on("plan"),
    shell:
        "OMP_NUM_THREADS={threads} python -m snaketune plan --spec {params.spec:q} --code {params.code} --reruns-on {params.reruns_on}"
        " --tokens {input.tokens:q}"
        " --out $(dirname {output.manifest:q}) 2>&1 | tee {log:q}"
