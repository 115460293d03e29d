"""What a job does whose result is cached: it names the log of that, or computes if it is forced."""

from snaketune.stages.outcome import Outcome

from .demo_jobs import build_demo


def test_a_forced_job_computes_though_its_result_exists_and_begins_anew(tmp_path):
    built: list = []

    def writes(work):
        built.append((work.state / "half").exists())
        (work.state / "half").touch()
        (work.payload / "rows.txt").write_text("rows")
        return Outcome(counts={})

    manifest = build_demo(tmp_path, writes)
    before = manifest.read_bytes()
    build_demo(tmp_path, writes)
    build_demo(tmp_path, writes, forced=True)
    assert built == [False, False] and manifest.read_bytes() == before


def test_a_cached_result_names_the_log_of_the_attempt_that_made_it(tmp_path, capsys):
    def writes(work):
        log.write_text("step 1/1")
        return Outcome(counts={})

    log, out = tmp_path / "results/logs/demo/a-1.5.log", tmp_path / "results/demo/a-1.5"
    log.parent.mkdir(parents=True)
    build_demo(tmp_path, writes, out=out)
    log.write_text("nothing to compute")
    capsys.readouterr()
    build_demo(tmp_path, writes, out=out)
    (kept,) = tmp_path.glob("results/.work/demo/*/log")
    assert kept.read_text() == "step 1/1" and f"its log is {kept}" in capsys.readouterr().out
