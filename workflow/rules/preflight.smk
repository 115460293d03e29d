"""What would fail or crawl hours later, found before the first training of a family of runs."""


rule preflight:
    input:
        unpack(inputs_of("preflight")),
    output:
        **outputs_of("preflight"),
    log:
        log_of("preflight"),
    conda:
        "../../envs/train.yaml"
    threads: threads_of("preflight")
    resources:
        **resources_of("preflight"),
    params:
        **params_of("preflight"),
    shell:
        command_of("preflight")
