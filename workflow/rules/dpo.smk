"""Direct preference optimization."""


rule dpo:
    input:
        unpack(inputs_of("dpo")),
    output:
        manifest="results/dpo/{name}/manifest.json",
        payload=directory("results/dpo/{name}/model"),
        run="results/dpo/{name}/run.json",
    log:
        "results/logs/dpo/{name}.log",
    conda:
        "../../envs/train.yaml"
    threads: 8
    resources:
        mem_mb=64000,
        runtime=2880,
        gpu=operation_of("dpo", "gpus"),
        nodes=1,
        checkpoint_steps=operation_of("dpo", "checkpoint_steps"),
        log_steps=operation_of("dpo", "log_steps"),
        load_in_memory=operation_of("dpo", "load_in_memory"),
    params:
        spec=spec_of("dpo"),
        code=code_of("dpo"),
        reruns_on=reruns_on("dpo"),
    shell:
        "OMP_NUM_THREADS={threads} python -m snaketune dpo --spec {params.spec:q} --code {params.code} --reruns-on {params.reruns_on}"
        " --model {input.model:q} --pack {input.pack:q} --ref-logps {input.ref_logps:q}"
        " --gpus {resources.gpu} --checkpoint-steps {resources.checkpoint_steps} --log-steps {resources.log_steps}"
        " --load-in-memory {resources.load_in_memory}"
        " --out $(dirname {output.manifest:q}) 2>&1 | tee {log:q}"
