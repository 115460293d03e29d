"""Comparisons of a race: false eliminations, scores of rows, decisions."""

import json

import numpy as np
import pyarrow as pa
import pytest

from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError
from snaketune.evaluation.held_out import LOSSES
from snaketune.evaluation.preference_accuracy import PAIRS
from snaketune.evaluation.race import ERROR, build, replacements, row_scores
from snaketune.files import digest_file
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.races import FILE, PAYLOAD, paused_at
from snaketune.stages.specs import RaceSpec
from snaketune.tables import write_table


def simulate(draws, rows, keep, gap, accuracy, tolerance=0.0):
    """Whether a race of eight variants at two rungs pauses one of the best `keep`, and the share of the others it pauses."""
    random = np.random.default_rng(draws)
    means = gap * np.sort(random.normal(size=8))
    wrong, paused = False, set()
    # Rows differ in difficulty, and a variant's scores at the second rung resemble those at the first.
    row, own = random.normal(size=rows), random.normal(size=(8, rows))
    for rung in range(2):
        noise = own if rung == 0 else 0.8 * own + 0.6 * random.normal(size=(8, rows))
        margins = row + noise + means[:, None]
        values = (margins > 0).astype(float) if accuracy else margins
        running = {str(one): values[one] for one in range(8) if str(one) not in paused}
        replacing = replacements(running, keep, ERROR / (2 * keep * (8 - keep)), tolerance)
        paused |= {run for run, others in replacing.items() if others >= keep}
        # Pausing one of the best is wrong if it is better than all that aren't paused, by more than the tolerance.
        unpaused = [means[one] for one in range(8) if str(one) not in paused]
        wrong |= any(str(one) in paused and means[one] > sorted(unpaused)[-keep] + tolerance for one in range(8))
    return wrong, len(paused) / (8 - keep)


@pytest.mark.parametrize("accuracy", [False, True])
@pytest.mark.parametrize(("rows", "keep", "gap"), [(20, 1, 0.0), (50, 3, 0.0), (200, 1, 0.3)])
def test_of_1000_races_at_most_one_in_twenty_pauses_one_of_the_best(rows, keep, gap, accuracy):
    races = [simulate(draws, rows, keep, gap, accuracy) for draws in range(1000)]
    assert sum(wrong for wrong, _ in races) <= 50
    # Where variants differ clearly, most are paused.
    if gap == 0.3:
        assert np.mean([share for _, share in races]) > 0.4


@pytest.fixture
def evaluated(tmp_path):
    """Return a function that writes an evaluation with these margins of pairs, or losses of documents of two tokens."""

    def write(name, margins=(), losses=(), reference=0.0):
        folder = tmp_path / name
        folder.mkdir()
        pairs = [
            {
                "corpus": "pairs", "id": f"p{number}", "source": 0, "chosen_logp": margin - 5.0, "rejected_logp": -5.0,
                "chosen_tokens": 2, "rejected_tokens": 4, "reference_chosen_logp": reference, "reference_rejected_logp": 0.0,
            }
            for number, margin in enumerate(margins)
        ]  # fmt: skip
        documents = [
            {"corpus": "chat", "document": number, "loss_nats": loss, "tokens": 2} for number, loss in enumerate(losses)
        ]
        write_table(folder / "pairs.arrow", pa.Table.from_pylist(pairs, schema=PAIRS))
        write_table(folder / "losses.arrow", pa.Table.from_pylist(documents, schema=LOSSES))
        payload = {path.name: {"digest": digest_file(path), "bytes": path.stat().st_size} for path in folder.iterdir()}
        manifest = {"payload": payload, "records": {}}
        return Artifact(manifest_path=tmp_path / f"{name}.json", folder=folder, manifest=manifest)

    return write


def spec_of(*runs, **changes):
    return RaceSpec(
        **{"metric": "logp_margin_nats", "keep": 1, "tolerance": 0.0, "looks": 2, "rung": 0.1, "runs": runs} | changes
    )


@pytest.fixture
def decide(tmp_path):
    """Return a function that runs the stage, and returns race.json and the result."""

    def run(spec, evaluated, before=(), stopped=()):
        folder = tmp_path / f"race@{spec.rung}"
        work = WorkFolder(folder / "work")
        work.start()
        made = [
            Artifact(tmp_path / f"{run}/manifest.json", {"stopped": {"step": 7}} if run in stopped else {}, tmp_path)
            for run in spec.runs
        ]
        build(spec, work, snapshots=made, evaluated=evaluated, before=before)
        work.payload.rename(folder / PAYLOAD)
        path = folder / PAYLOAD / FILE
        manifest = {"payload": {FILE: {"digest": digest_file(path), "bytes": path.stat().st_size}}, "records": {}}
        result = Artifact(manifest_path=folder / "manifest.json", folder=folder / PAYLOAD, manifest=manifest)
        return json.loads(path.read_text()), result

    return run


def test_scores_of_rows(evaluated):
    of_pairs = evaluated("pairs", margins=[1.0, -1.0, 0.0], reference=2.0)
    expected = {
        "logp_margin_nats": [1.0, -1.0, 0.0], "logp_accuracy": [1.0, 0.0, 0.5], "reward_margin_nats": [-1.0, -3.0, -2.0],
        "reward_accuracy": [0.0, 0.0, 0.0], "logp_accuracy_per_token": [0.0, 0.0, 0.0],
    }  # fmt: skip
    for metric, scores in expected.items():
        rows, found = row_scores(of_pairs, metric)
        assert (rows, found.tolist()) == (["p0", "p1", "p2"], scores)
    rows, scores = row_scores(evaluated("documents", losses=[2.0, 6.0]), "held_out_loss")
    assert (rows, scores.tolist()) == ([(0, 2), (1, 2)], [-1.0, -3.0])


def test_a_variant_is_paused_once_and_stays_so(evaluated, decide):
    noise = np.linspace(-1, 1, 30)
    first, race = decide(
        spec_of("dpo/a", "dpo/b", "dpo/c"),
        [evaluated("a1", noise), evaluated("b1", noise[::-1] / 50 + noise + 0.001), evaluated("c1", noise / 2 - 3)],
    )
    assert first["paused"] == {"dpo/c": 0.1}
    assert [line["run"] for line in first["table"]] == ["dpo/b", "dpo/a", "dpo/c"]
    assert first["table"][0]["difference"] == [0.0, 0.0] and first["table"][2]["difference"][1] < 0
    # Named by its snapshots too.
    assert (paused_at(race.manifest_path, "dpo/c@0.3"), paused_at(race.manifest_path, "dpo/a")) == (0.1, None)
    second, _ = decide(
        spec_of("dpo/a", "dpo/b", "dpo/c", rung=0.3),
        [evaluated("a3", noise), evaluated("b3", noise / 2 + 4), evaluated("c3", noise + 99)],
        before=[race],
    )
    assert second["paused"] == {"dpo/a": 0.3, "dpo/c": 0.1}


def test_as_many_are_kept_as_configured(evaluated, decide):
    noise = np.linspace(-1, 1, 30)
    others = [evaluated(name, noise * (1 + number / 99) - number) for number, name in enumerate("abc")]
    runs = ("dpo/a", "dpo/b", "dpo/c")
    assert decide(spec_of(*runs), others)[0]["paused"] == {"dpo/b": 0.1, "dpo/c": 0.1}
    assert decide(spec_of(*runs, keep=2, rung=0.2), others)[0]["paused"] == {"dpo/c": 0.2}


def test_a_lower_loss_is_better(evaluated, decide):
    losses = np.linspace(2, 4, 30)
    found, _ = decide(
        spec_of("sft/a", "sft/b", metric="held_out_loss"),
        [evaluated("high", losses=losses + 2), evaluated("low", losses=losses)],
    )
    assert found["paused"] == {"sft/a": 0.1} and found["best"] == "sft/b"
    assert found["table"][1] == {
        "run": "sft/a", "mean": 2.5, "difference": [1.0, 1.0], "replaced_by": 1, "paused": True
    }  # fmt: skip


def test_a_run_that_a_threshold_stopped_neither_continues_nor_replaces_others(evaluated, decide):
    noise = np.linspace(-1, 1, 30)
    runs = ("dpo/a", "dpo/b", "dpo/c")
    scores = [evaluated("a", noise + 9), evaluated("b", noise), evaluated("c", noise / 2 - 3)]
    found, _ = decide(spec_of(*runs), scores, stopped=["dpo/a"])
    assert (found["best"], found["paused"], found["stopped"]) == ("dpo/b", {"dpo/c": 0.1}, {"dpo/a": 7})
    found, _ = decide(spec_of(*runs, rung=0.2), scores, stopped=runs)
    assert (found["best"], found["table"], found["paused"]) == (None, [], {})


def test_what_cant_be_compared_is_refused(evaluated, decide):
    with pytest.raises(SnaketuneError, match="different held-out rows"):
        decide(spec_of("dpo/a", "dpo/b"), [evaluated("a", [0.0] * 20), evaluated("b", [9.0] * 21)])
    with pytest.raises(SnaketuneError, match="has 19 held-out rows, and 20 are needed"):
        decide(spec_of("dpo/a", "dpo/b", rung=0.2), [evaluated("d", [0.0] * 19), evaluated("e", [9.0] * 19)])
    with pytest.raises(SnaketuneError, match="scores of dpo/b aren't finite"):
        decide(spec_of("dpo/a", "dpo/b", rung=0.3), [evaluated("f", [0.0] * 20), evaluated("g", [float("nan")] * 20)])
    with pytest.raises(SnaketuneError, match="20 of 20 held-out pairs have no log-probabilities of the reference"):
        row_scores(evaluated("c", [0.0] * 20, reference=None), "reward_accuracy")
