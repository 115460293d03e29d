"""Measurements of held-out rows during a training: when, of which rows, what they decide, and answers to a few prompts.

The cost is counted in tokens of forward passes: a trained token costs about three of them (forward, and twice that backward),
or two if the base weights are frozen. Answers are greedy and short, by the training's own kernel and without a cache, so that
nothing about the model is changed for them.

    best/checkpoint-40     the trained weights at the best measurement so far, complete like a checkpoint
    best/checkpoint-20     those that were the best when the last checkpoint was written, from which a killed training resumes
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from snaketune.engine.checkpoints import COMPLETE
from snaketune.engine.model.batches import collate
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.forward import packed_logits
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.packing.shards import IGNORED

# Prefix of the metrics of a log line that measures held-out rows: transformers', by which trackers group them.
HELD_OUT = "eval_"
Point = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class HeldOutSettings:
    """How held-out rows are measured, and what the measurements decide.

    Attributes:
        every: interval, a share of the training below 1 or a number of steps; `auto` takes at most 3% of its time.
        rows, samples: packed rows per measurement, and prompts that are answered.
        metric: by which a measurement is the best: the lowest `loss`, the highest `accuracy` or `margin`.
        keep_best: whether the weights of the best measurement are the result.
        patience: the training ends after so many measurements in a row that are worse than the best one; None: never.
    """

    every: Literal["auto"] | float = "auto"
    rows: int = 512
    samples: int = 2
    metric: str = "loss"
    keep_best: bool = False
    patience: int | None = None

    @property
    def selects(self) -> bool:
        """Whether measurements shape the result."""
        return self.keep_best or self.patience is not None


class Decoder(Protocol):
    """What a tokenizer has to do for samples."""

    stop_ids: tuple[int, ...]

    def decode(self, ids: Any) -> str: ...


# Share of a training's computation that measurements take at most with `every: auto`. Eager layers and batches made on the spot
# make it up to half as much again of its time, which is to be 3% at most.
MAX_SHARE = 0.02
# Measurements of `every: auto`, with that before the first step: the most, and the fewest before fewer rows are measured.
MOST, FEWEST = 11, 5


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The measurements of a training.

    Attributes:
        steps: optimizer steps after which held-out rows are measured, ascending; 0 is before the first step.
        rows: indices of the measured rows, ascending.
        samples: prompts that are answered at each measurement.
        share: expected share of the training's computation that all measurements take.
    """

    steps: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    samples: int = 0
    share: float = 0.0


def plan_measurements(
    settings: HeldOutSettings,
    *,
    steps: int,
    trained_tokens: float,
    row_tokens_R: np.ndarray,
    sample_tokens: int,
    passes: float,
    limited: bool,
) -> Schedule:
    """Return the measurements of a training of so many optimizer steps; none if there are no rows or it is too short.

    Args:
        trained_tokens: tokens of all steps.
        row_tokens_R: int[R], the tokens of each held-out row.
        sample_tokens: tokens of the forward passes that answer the sample prompts once.
        passes: forward passes that a trained token costs.
        limited: whether `every: auto` is limited to MAX_SHARE; measurements that decide about the result aren't.

    >>> held_out = {"row_tokens_R": np.full(20, 500), "sample_tokens": 9000}
    >>> long = plan_measurements(HeldOutSettings(), steps=1000, trained_tokens=8e6, **held_out, passes=3, limited=True)
    >>> long.steps[:3], len(long.rows), long.samples, round(long.share, 3)
    ((0, 100, 200), 20, 2, 0.009)
    >>> short = plan_measurements(HeldOutSettings(), steps=100, trained_tokens=1e5, **held_out, passes=3, limited=True)
    >>> short.steps, len(short.rows), short.samples, round(short.share, 3)
    ((0, 25, 50, 75, 100), 2, 0, 0.017)
    """
    drawn = np.random.default_rng(0).permutation(len(row_tokens_R))[: settings.rows]
    if not len(drawn) or not steps:
        return Schedule()
    computed, mean = passes * trained_tokens, row_tokens_R[drawn].mean()
    if settings.every != "auto":
        interval = max(1, steps * settings.every if settings.every < 1 else settings.every)
        # A share of 1/3 isn't exact, so the last interval may end just before the last step.
        measured = (*(round(n * interval) for n in range(math.ceil(steps / interval - 1e-6))), steps)
        samples = settings.samples
    else:
        times, rows, samples = MOST, len(drawn), settings.samples
        if limited:
            affordable = MAX_SHARE * computed / mean
            times = min(MOST, max(FEWEST, int(affordable / rows)))
            rows = min(rows, int(affordable / times))
            if not rows:
                return Schedule()
            samples = samples if times * (rows * mean + sample_tokens) <= MAX_SHARE * computed else 0
        times, drawn = min(times, steps + 1), drawn[:rows]
        measured = tuple(dict.fromkeys(round(n * steps / (times - 1)) for n in range(times)))
    cost = row_tokens_R[drawn].sum() + (sample_tokens if samples else 0)
    share = float(len(measured) * cost / computed)
    return Schedule(steps=measured, rows=tuple(np.sort(drawn).tolist()), samples=samples, share=share)


def points(history: list[dict[str, Any]]) -> list[Point]:
    """Return the measurements among the entries of a log, without the prefix of their keys.

    >>> points([{"loss": 2.0, "step": 5}, {"eval_loss": 2.5, "eval_margin": 0.1, "step": 5}])
    [{'loss': 2.5, 'margin': 0.1, 'step': 5}]
    """
    # Each has a loss.
    measured = (entry for entry in history if f"{HELD_OUT}loss" in entry)
    return [
        {name.removeprefix(HELD_OUT): value for name, value in entry.items() if name != "epoch"} for entry in measured
    ]


def best_point(measured: list[Point], metric: str) -> Point | None:
    """Return the first of the best measurements; None without any.

    >>> best_point([{"loss": 3.0, "step": 0}, {"loss": 2.0, "step": 5}, {"loss": 2.0, "step": 9}], "loss")
    {'loss': 2.0, 'step': 5}
    """
    sign = -1 if metric == "loss" else 1
    return max((point for point in measured if metric in point), key=lambda point: sign * point[metric], default=None)


def reason_to_stop(measured: list[Point], settings: HeldOutSettings) -> str:
    """Return why `stop_if` ends the training after the last of these measurements; "" if it doesn't.

    >>> settings = HeldOutSettings(patience=2)
    >>> reason_to_stop([{"loss": loss, "step": step} for step, loss in enumerate((3.0, 2.0, 2.5, 2.1))], settings)
    'held-out loss 2.1 is worse than 2 at step 1, the best, for 2 measurements in a row'
    """
    best, metric = best_point(measured, settings.metric), settings.metric
    if settings.patience is None or best is None:
        return ""
    worse = sum(point["step"] > best["step"] for point in measured)
    if worse < settings.patience:
        return ""
    return (
        f"held-out {metric} {measured[-1][metric]:.5g} is worse than {best[metric]:.5g} at step {best['step']}, the best, for "
        f"{worse} measurements in a row"
    )


def best_folder(folder: Path, step: int) -> Path:
    """Return the folder of the best weights of a step. Args: folder: of all best weights."""
    return folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def has_its_best(checkpoint: Path, folder: Path, metric: str) -> bool:
    """Whether the weights of the best measurement before a checkpoint are complete in `folder`."""
    history = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    best = best_point(points(history), metric)
    return best is None or (best_folder(folder, best["step"]) / COMPLETE).is_file()


def remove_other_best(folder: Path, kept: int | None) -> None:
    """Remove the weights of measurements that are the best no more. Args: kept: the step of those that are."""
    for other in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if other.name != f"{PREFIX_CHECKPOINT_DIR}-{kept}":
            shutil.rmtree(other)


def best_step(state: TrainerState, metric: str) -> int | None:
    """Return the step of the best measurement so far; None without any."""
    best = best_point(points(state.log_history), metric)
    return best and best["step"]


# Answers are at most so long, and their prompts.
NEW_TOKENS, PROMPT_TOKENS = 48, 512


class SamplePrompts:
    """The first prompts of the held-out rows: the tokens before a document's first supervised one, of at most PROMPT_TOKENS.

    Documents that are supervised from the start, as texts are, have none.
    """

    def __init__(self, rows: PackedRows, load_decoder: Callable[[], Decoder]):
        self.rows, self.load_decoder = rows, load_decoder

    def tokens(self, count: int) -> int:
        """Return the tokens of the forward passes that answer the first `count` prompts: each new token is a pass over all
        tokens so far."""
        return sum(NEW_TOKENS * (len(prompt) + NEW_TOKENS // 2) for prompt, _ in _prompts(self.rows, count))

    def answers(self, model: torch.nn.Module, count: int, compute: Compute) -> list[dict[str, str]]:
        """Return prompt, expected and given answer of the first `count` prompts."""
        decoder = self.load_decoder()
        return [
            {
                "prompt": decoder.decode(prompt),
                "expected": decoder.decode(expected),
                "answer": decoder.decode(_answer(model, prompt, decoder.stop_ids, compute)),
            }
            for prompt, expected in _prompts(self.rows, count)
        ]


@torch.no_grad()
def _answer(model: torch.nn.Module, prompt: np.ndarray, stop_ids: tuple[int, ...], compute: Compute) -> np.ndarray:
    """Continue a prompt, int32[n], until a stop token or by NEW_TOKENS; return the new tokens."""
    ids = prompt
    while len(ids) < len(prompt) + NEW_TOKENS and (len(ids) == len(prompt) or ids[-1] not in stop_ids):
        segment = {"segment_lengths": np.array([len(ids)], np.int32), "prefix_lengths": np.zeros(1, np.int32)}
        row = {"input_ids": ids, "labels": np.full(len(ids), IGNORED, np.int32)} | segment
        batch = collate([row], compute.kernel).to(compute.device)
        with compute.autocast():
            logits_1V = packed_logits(model, batch, torch.tensor([len(ids) - 1], device=compute.device))
        ids = np.append(ids, np.int32(logits_1V.argmax().item()))
    return ids[len(prompt) :]


def _prompts(rows: Any, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the tokens of the first `count` prompts and of the answers that follow them, of one document per row.

    >>> row = {"input_ids": np.arange(9), "labels": np.array([-100, -100, 2, 3, -100, -100, 6, 7, 8])}
    >>> (prompt, answer), = _prompts([row | {"segment_lengths": np.array([5, 4])}], count=2)
    >>> prompt.tolist(), answer.tolist()
    ([0, 1], [2, 3])
    """
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for number in range(len(rows)):
        row = rows[number]
        length = int(row["segment_lengths"][0])
        ids, is_target = row["input_ids"][:length], row["labels"][:length] != IGNORED
        first = int(is_target.argmax())
        if 0 < first <= PROMPT_TOKENS and len(found) < count:
            rest = np.flatnonzero(~is_target[first:])
            found.append((ids[:first], ids[first : first + int(rest[0]) if len(rest) else length]))
        if len(found) == count:
            break
    return found
