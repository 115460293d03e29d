"""The jobs of `snakemake verify`: which trainings are checked, and with which evaluation, file and reference."""


def test_each_training_is_checked_once_and_rungs_of_races_are_not(planned):
    checked = [job for job in planned if job.stage == "verification"]
    trained = [job for job in planned if job.stage in ("sft", "dpo")]
    names = {f"{job.stage}-{job.name}" for job in trained}
    rungs = names - {job.name for job in checked}
    assert len({job.name for job in checked}) == len(checked) and {job.name for job in checked} < names
    assert rungs and all("@" in name for name in rungs)


def test_a_check_reads_what_the_training_read_and_what_was_made_of_it(jobs):
    job, training = jobs["verification/dpo-other"], jobs["dpo/other"]
    assert job.artifacts["model"] == (training,)
    for role in ("pack", "ref_logps", "reference"):
        assert job.artifacts[role] == training.artifacts[role]
    assert [one.name for one in job.artifacts["corpus"]] == ["pairs"]
    (evaluation,) = job.artifacts["evaluation"]
    assert evaluation.name == "all/dpo-other"
    assert job.artifacts["evaluated"] == evaluation.artifacts["packs"]
    assert (job.spec.conversations, job.spec.preferences) == (
        evaluation.spec.conversations,
        evaluation.spec.preferences,
    )
    converted = jobs["verification/dpo-plain"]
    assert [one.key for one in converted.artifacts["gguf"]] == ["convert/best"] and converted.spec.gguf_type == "q8_0"
    assert not converted.artifacts["evaluation"] and not converted.spec.conversations
    assert job.spec.run == training.spec and job.operation.gpus <= 1 and job.operation.nodes == 1
    assert jobs["verification/sft-scratch"].spec.gguf_type is None


def test_report_and_cards_show_checks_where_the_config_asks_for_it(jobs):
    assert "verification/dpo-plain" in {one.key for one in jobs["card/dpo-plain"].artifacts["results"]}
    assert "verification/dpo-plain" in {one.key for one in jobs["report"].artifacts["results"]}
    assert "reproduction/dpo-plain" in {one.key for one in jobs["card/dpo-plain"].artifacts["results"]}
    assert "reproduction/dpo-plain" in {one.key for one in jobs["report"].artifacts["results"]}


def test_each_run_is_replayed_with_its_resources_and_inputs(planned, jobs):
    replayed = {job.name for job in planned if job.stage == "reproduction"}
    trained = {f"{job.stage}-{job.name}" for job in planned if job.stage in ("sft", "dpo") and "@" not in job.name}
    assert replayed == trained
    job, training = jobs["reproduction/sft-merged"], jobs["sft/merged"]
    assert (job.operation.gpus, job.operation.launch) == (2, "fsdp")
    assert job.artifacts["model"] == (training,) and job.artifacts["pack"] == training.artifacts["pack"]
    assert job.files == training.files and job.spec.run == training.spec
    assert jobs["reproduction/sft-taught"].artifacts["teacher"] == jobs["sft/taught"].artifacts["teacher"]
    assert [one.key for one in jobs["reproduction/dpo-stacked"].artifacts["start"]] == ["sft/again", "sft/apart"]
    # A rung of a race is a snapshot of its run.
    (rates,) = (one for one in planned if one.key == "reproduction/sft-rates-learning_rate1e-05")
    assert [one.name.partition("@")[2] for one in rates.artifacts["snapshots"]] == ["0.2", "0.5"]
