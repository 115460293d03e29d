rule teacher_pass:
    """Compute one part of the teacher's tokens, if the config divides them among jobs; parts run in parallel."""
    input:
        unpack(inputs_of("teacher_pass")),
    output:
        manifest="results/teacher_pass/{name}/{part}/manifest.json",
        payload=directory("results/teacher_pass/{name}/{part}/tokens"),
        run="results/teacher_pass/{name}/{part}/run.json",
    log:
        "results/logs/teacher_pass/{name}/{part}.log",
    group:
        group_of("teacher_pass")
    conda:
        "../../envs/train.yaml"
    threads: threads_of("teacher_pass")
    resources:
        **resources_of("teacher_pass"),
    params:
        spec=spec_of("teacher_pass"),
    message:
        line_of("teacher_pass/{wildcards.name}/{wildcards.part}")
    shell:
        "python -m snaketune teacher_pass {input.job:q} 2>&1 | tee {log:q}"
