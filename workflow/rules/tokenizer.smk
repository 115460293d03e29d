"""A vocabulary trained on the corpora, or adopted from a base model."""


rule tokenizer:
    input:
        unpack(inputs_of("tokenizer")),
    output:
        manifest="results/tokenizer/{name}/manifest.json",
        payload=directory("results/tokenizer/{name}/tokenizer"),
        run="results/tokenizer/{name}/run.json",
    log:
        "results/logs/tokenizer/{name}.log",
    conda:
        "../../envs/data.yaml"
    threads: 4
    resources:
        mem_mb=16000,
        runtime=240,
        gpu=0,
    params:
        spec=spec_of("tokenizer"),
        code=code_of("tokenizer"),
        reruns_on=reruns_on("tokenizer"),
    shell:
        "OMP_NUM_THREADS={threads} python -m snaketune tokenizer --spec {params.spec:q} --code {params.code} --reruns-on {params.reruns_on}"
        " --corpora {input.corpora:q} --chat-template {input.chat_template:q} --base {input.base:q}"
        " --out $(dirname {output.manifest:q}) 2>&1 | tee {log:q}"
