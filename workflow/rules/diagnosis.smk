rule diagnosis:
    """Attribute the gain in speed to the changes of a diagnosis."""
    input:
        unpack(inputs_of("diagnosis")),
    output:
        manifest="results/diagnosis/{name}/manifest.json",
        payload=directory("results/diagnosis/{name}/attribution"),
        run="results/diagnosis/{name}/run.json",
    log:
        "results/logs/diagnosis/{name}.log",
    localrule: True
    conda:
        "../../envs/data.yaml"
    threads: 1
    resources:
        **resources_of("diagnosis"),
    shell:
        "python -m snaketune diagnosis {input.job:q} 2>&1 | tee {log:q}"


rule diagnose:
    """Attribute the gain in speed to the changes of each diagnosis in the config."""
    input:
        results_of("diagnosis", key="diagnose"),
