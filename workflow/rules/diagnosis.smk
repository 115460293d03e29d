"""What each change of a diagnosis brings; `snakemake diagnose` makes all that the config asks for."""


rule diagnosis:
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
    input:
        results_of("diagnosis", key="diagnose"),
