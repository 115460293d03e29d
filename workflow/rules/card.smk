rule card:
    """Write the model card of a trained model: README.md, as the Hub reads it."""
    input:
        unpack(inputs_of("card")),
    output:
        manifest="results/card/{model}/manifest.json",
        payload=directory("results/card/{model}/card"),
        run="results/card/{model}/run.json",
    log:
        "results/logs/card/{model}.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **resources_of("card"),
    params:
        spec=spec_of("card"),
    message:
        line_of("card/{wildcards.model}")
    shell:
        "python -m snaketune card {input.job:q} 2>&1 | tee {log:q}"
