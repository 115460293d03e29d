"""One model on the held-out rows: loss, exact match, preference accuracy, tasks, samples."""


rule eval:
    input:
        unpack(inputs_of("eval")),
    output:
        manifest="results/eval/{evaluation}/{model}/manifest.json",
        payload=directory("results/eval/{evaluation}/{model}/scores"),
        run="results/eval/{evaluation}/{model}/run.json",
    log:
        "results/logs/eval/{evaluation}/{model}.log",
    conda:
        "../../envs/eval.yaml"
    threads: 8
    resources:
        mem_mb=32000,
        runtime=480,
        gpu=operation_of("eval", "gpus"),
        nodes=1,
    params:
        spec=spec_of("eval"),
        code=code_of("eval"),
        reruns_on=reruns_on("eval"),
    shell:
        "OMP_NUM_THREADS={threads} python -m snaketune eval --spec {params.spec:q} --code {params.code} --reruns-on {params.reruns_on}"
        " --model {input.model:q} --tokenizer {input.tokenizer:q} --corpora {input.corpora:q} --packs {input.packs:q} --ref-logps {input.ref_logps:q} --base {input.base:q} --tasks {input.tasks:q} --task-data {input.task_data:q} --gpus {resources.gpu}"
        " --out $(dirname {output.manifest:q}) 2>&1 | tee {log:q}"
