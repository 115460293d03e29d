"""Supervised fine-tuning."""


rule sft:
    input:
        unpack(inputs_of("sft")),
    output:
        manifest="results/sft/{name}/manifest.json",
        payload=directory("results/sft/{name}/model"),
        run="results/sft/{name}/run.json",
    log:
        "results/logs/sft/{name}.log",
    conda:
        "../../envs/train.yaml"
    threads: 8
    resources:
        mem_mb=64000,
        runtime=2880,
        gpu=operation_of("sft", "gpus"),
        nodes=1,
        checkpoint_steps=operation_of("sft", "checkpoint_steps"),
        log_steps=operation_of("sft", "log_steps"),
        load_in_memory=operation_of("sft", "load_in_memory"),
    params:
        spec=spec_of("sft"),
        code=code_of("sft"),
        reruns_on=reruns_on("sft"),
    shell:
        "OMP_NUM_THREADS={threads} python -m snaketune sft --spec {params.spec:q} --code {params.code} --reruns-on {params.reruns_on}"
        " --pack {input.pack:q} --tokenizer {input.tokenizer:q} --base {input.base:q}"
        " --gpus {resources.gpu} --checkpoint-steps {resources.checkpoint_steps} --log-steps {resources.log_steps}"
        " --load-in-memory {resources.load_in_memory}"
        " --out $(dirname {output.manifest:q}) 2>&1 | tee {log:q}"
