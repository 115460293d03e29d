rule convert:
    """Convert a trained model to one GGUF file, by llama.cpp's own converter."""
    input:
        unpack(inputs_of("convert")),
    output:
        manifest="results/convert/{name}/manifest.json",
        payload=directory("results/convert/{name}/gguf"),
        run="results/convert/{name}/run.json",
    log:
        "results/logs/convert/{name}.log",
    group:
        group_of("convert")
    conda:
        "../../envs/train.yaml"
    threads: 1
    resources:
        **resources_of("convert"),
    params:
        spec=spec_of("convert"),
    message:
        line_of("convert/{wildcards.name}")
    shell:
        "python -m snaketune convert {input.job:q} 2>&1 | tee {log:q}"


rule gguf:
    """Make the GGUF files that the config names."""
    input:
        results_of("convert", key="gguf"),
