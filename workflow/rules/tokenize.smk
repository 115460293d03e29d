"""One part of a corpus to token ids and where they are learned; the parts of a corpus run side by side."""


rule tokenize:
    input:
        unpack(inputs_of("tokenize")),
    output:
        manifest="results/tokenize/{name}/{part}/manifest.json",
        payload=directory("results/tokenize/{name}/{part}/tokens"),
        run="results/tokenize/{name}/{part}/run.json",
    log:
        "results/logs/tokenize/{name}/{part}.log",
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=240,
        gpu=0,
    params:
        spec=spec_of("tokenize"),
        code=code_of("tokenize"),
        reruns_on=reruns_on("tokenize"),
    shell:
        "OMP_NUM_THREADS={threads} RAYON_NUM_THREADS={threads} python -m snaketune tokenize"
        " --spec {params.spec:q} --code {params.code} --reruns-on {params.reruns_on}"
        " --corpus {input.corpus:q} --tokenizer {input.tokenizer:q}"
        " --out $(dirname {output.manifest:q}) 2>&1 | tee {log:q}"
