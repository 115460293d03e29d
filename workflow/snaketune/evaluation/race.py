"""The `race` stage: compares the variants of a grid at one rung, and pauses those that are clearly worse than others.

race.json has for every variant that still runs its mean score and the interval of its difference to the best one; `paused`, the
share of the run at which each paused variant ended; and `stopped`, the step at which a threshold (`dpo.NAME.stop_if`) ended a
variant, which then neither continues nor replaces others.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError
from snaketune.evaluation.score_intervals import student
from snaketune.files import write_json
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Stage, any_number
from snaketune.stages.outcome import Outcome
from snaketune.stages.races import FILE, PAYLOAD, paused_at
from snaketune.stages.specs import RaceSpec

if TYPE_CHECKING:
    import numpy as np

STAGE = Stage(
    module=__name__,
    spec=RaceSpec,
    payload=PAYLOAD,
    inputs={
        "snapshots": any_number("sft", "dpo", entries=("stopped",)),
        "evaluated": any_number("eval"),
        "before": any_number("race"),
    },
    group="models",
    in_report=True,
)
# The probability that chance alone pauses one of the best variants, over all rungs.
ERROR = 0.05
# With fewer rows, Student's t doesn't hold for the means of their scores.
MIN_ROWS = 20


def build(
    spec: RaceSpec,
    work: WorkFolder,
    *,
    snapshots: Sequence[Artifact],
    evaluated: Sequence[Artifact],
    before: Sequence[Artifact],
) -> Outcome:
    """Write race.json to `work.payload`.

    Args:
        snapshots, evaluated: the result of each of `spec.runs` at this rung, and its evaluation.
        before: the race at the rung before; empty at the first one.
    Raises:
        SnaketuneError: an evaluation lacks the score, or has too few rows, or others than the others.
    """
    for race in before:
        race.files()
    earlier = {run: share for run in spec.runs for race in before if (share := paused_at(race.manifest_path, run))}
    stopped = {
        run: snapshot.manifest["stopped"]["step"]
        for run, snapshot in zip(spec.runs, snapshots, strict=True)
        if failed(snapshot)
    }
    values = {
        run: row_scores(evaluation, spec.metric)
        for run, evaluation in zip(spec.runs, evaluated, strict=True)
        if run not in earlier | stopped
    }
    rows = check_rows(values) if values else 0
    scores = {run: of_rows for run, (_, of_rows) in values.items()}
    # Of a loss, row_scores are the negative.
    sign = -1 if spec.metric == "held_out_loss" else 1
    comparisons = spec.looks * spec.keep * (len(spec.runs) - spec.keep)
    error = ERROR / comparisons
    replacing = replacements(scores, spec.keep, error, spec.tolerance)
    paused = earlier | {run: spec.rung for run, others in replacing.items() if others >= spec.keep}
    ranked = by_mean(scores)
    best, table = next(iter(ranked), None), []
    for run in ranked:
        bounds = difference_bounds(scores[run] - scores[best], error)
        table.append(
            {
                "run": run,
                "mean": round(sign * float(scores[run].mean()), 6) + 0.0,
                "difference": [round(bound, 6) + 0.0 for bound in sorted(sign * bound for bound in bounds)],
                "replaced_by": replacing[run],
                "paused": run in paused,
            }
        )
    decisions = {"rows": rows, "best": best, "table": table, "paused": paused, "stopped": stopped}
    write_json(work.payload / FILE, decisions)
    for run, step in stopped.items():
        print(f"{run}: stopped early, at step {step}", flush=True)
    for line in table:
        low, high = line["difference"]
        against = "" if line["run"] == best else f", {low:+.4g} to {high:+.4g} against the best"
        print(f"{line['run']}: {spec.metric} {line['mean']:.4g}{against}{'; paused' * line['paused']}", flush=True)
    return Outcome(counts={"runs": len(spec.runs), "paused": len(paused), "stopped": len(stopped)})


def failed(snapshot: Artifact) -> bool:
    """Whether a threshold of `dpo.NAME.stop_if` stopped a run; held-out rows that rise are no failure."""
    stop = snapshot.manifest.get("stopped")
    return bool(stop) and not stop.get("held_out")


def row_scores(evaluation: Artifact, metric: str) -> "tuple[Sequence[Any], np.ndarray]":
    """The held-out rows of an evaluation, and the score of each, float64[rows], the larger the better; their mean is the
    score, or, of a loss, its negative."""
    import numpy as np

    from snaketune.evaluation.pair_scores import margins, wins
    from snaketune.tables import read_table

    if metric == "held_out_loss":
        losses = read_table(evaluation.file("losses.arrow"))
        tokens_D = losses["tokens"].to_numpy()
        per_token_D = -losses["loss_nats"].to_numpy() / tokens_D.mean() if len(tokens_D) else np.zeros(0)
        return list(zip(losses["document"].to_pylist(), tokens_D.tolist())), per_token_D
    pairs = read_table(evaluation.file("pairs.arrow"))
    if metric.startswith("reward_") and (missing := pairs["reference_chosen_logp"].null_count):
        raise SnaketuneError(
            f"{evaluation.manifest_path}: {missing} of {len(pairs)} held-out pairs have no log-probabilities of the "
            f"reference that can be compared, so there is no {metric}; choose logp_accuracy or logp_margin_nats"
        )
    margin_P = margins(pairs)[metric.replace("margin_nats", "accuracy")]
    return pairs["id"].to_pylist(), margin_P if metric.endswith("_nats") else wins(margin_P)


def check_rows(values: "Mapping[str, tuple[Sequence[Any], np.ndarray]]") -> int:
    """The number of rows; SnaketuneError if they aren't the same for all runs, or too few."""
    import numpy as np

    (first, (rows, _)), *others = values.items()
    if infinite := next((run for run, (_, scores) in values.items() if not np.isfinite(scores).all()), None):
        raise SnaketuneError(
            f"race: scores of {infinite} aren't finite, so it can't be compared; remove it from the grid"
        )
    for run, (of_run, _) in others:
        if of_run != rows:
            raise SnaketuneError(
                f"{first} and {run} were evaluated on different held-out rows, so they can't be compared"
            )
    if len(rows) < MIN_ROWS:
        raise SnaketuneError(
            f"race of {first} and others: their corpus has {len(rows)} held-out rows, and {MIN_ROWS} are needed to compare on; "
            "raise the corpus' held_out, or remove the race"
        )
    return len(rows)


def replacements(scores: "Mapping[str, np.ndarray]", keep: int, error: float, tolerance: float) -> dict[str, int]:
    """For each run how many better runs that aren't paused can replace it: by a one-sided paired t-test each, they are
    better, or worse by no more than `tolerance`. A run that at least `keep` can replace is paused.

    Args:
        scores: by run, float64[rows].
        error: the probability of each test to find that of a run that is worse.

    >>> import numpy as np
    >>> rows = np.linspace(-1, 1, 100)
    >>> scores = {"a": rows, "b": rows[::-1] / 9 + 1, "c": rows / 9 + 1.01}
    >>> replacements(scores, 1, 0.01, 0.0), replacements(scores, 1, 0.01, 0.1)
    ({'c': 0, 'b': 0, 'a': 2}, {'c': 0, 'b': 1, 'a': 1})
    """
    found: dict[str, int] = {}
    for run in by_mean(scores):
        unpaused = (other for other in found if found[other] < keep)
        bounds = (difference_bounds(scores[other] - scores[run], error) for other in unpaused)
        found[run] = sum(low > -tolerance for low, _ in bounds)
    return found


def by_mean(scores: "Mapping[str, np.ndarray]") -> list[str]:
    """The runs, the best first, equal ones in their order."""
    return sorted(scores, key=lambda run: -scores[run].mean())


def difference_bounds(difference_R: "np.ndarray", error: float) -> tuple[float, float]:
    """Bounds of the mean of float64[R], R ≥ 2, each of which is wrong with this probability."""
    mean, size = float(difference_R.mean()), len(difference_R)
    half = student(size - 1, NormalDist().inv_cdf(1 - error)) * float(difference_R.std(ddof=1)) / math.sqrt(size)
    return mean - half, mean + half
