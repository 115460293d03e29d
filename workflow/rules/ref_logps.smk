"""Log-probabilities of all pairs under the SFT model, shared by every DPO run from it."""


rule ref_logps:
    input:
        unpack(inputs_of("ref_logps")),
    output:
        manifest="results/ref_logps/{name}/manifest.json",
        payload=directory("results/ref_logps/{name}/logps"),
        run="results/ref_logps/{name}/run.json",
    log:
        "results/logs/ref_logps/{name}.log",
    conda:
        "../../envs/train.yaml"
    threads: 8
    resources:
        mem_mb=64000,
        runtime=480,
        gpu=operation_of("ref_logps", "gpus"),
        nodes=1,
    params:
        spec=spec_of("ref_logps"),
        code=code_of("ref_logps"),
        reruns_on=reruns_on("ref_logps"),
    shell:
        "OMP_NUM_THREADS={threads} python -m snaketune ref_logps --spec {params.spec:q} --code {params.code} --reruns-on {params.reruns_on}"
        " --model {input.model:q} --pack {input.pack:q} --gpus {resources.gpu}"
        " --out $(dirname {output.manifest:q}) 2>&1 | tee {log:q}"
