"""The first losses, speed and memory, and a sweep."""

import json
import shutil
import time
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from benchmarks import processes
from benchmarks.dpo import sides
from benchmarks.dpo.material import make_reference
from benchmarks.jobs import Project
from benchmarks.processes import SNAKEFILE, checked, environment, measured, pinned
from benchmarks.results import in_turn, medians

from snaketune.evaluation.race import by_mean, check_rows, difference_bounds, row_scores
from snaketune.stages.job import result_at

# Pairs that TRL is fastest with, in a forward pass of the training and of the reference pass: of 1, 2, 4, 8 and 16 on one core.
AT_ONCE = {"raschka": (2, 4), "pandalm": (1, 2), "oasst": (1, 1)}
# TRL's default batch size; of long pairs, most of it is padding.
DEFAULT_AT_ONCE = (8, 8)
# The variants of a sweep, and the data set that its pairs are of.
BETAS, LOSSES = (0.05, 0.1, 0.2, 0.5), ("sigmoid", "ipo")
SWEPT = "pandalm"
# Of the race's pairs, this share is held out, so that as many are trained on as in the sweep without a race.
HELD_OUT, RACE = 1 / 3, {"metric": "reward_margin_nats", "tolerance": 0.1, "rungs": [0.12, 0.32]}
VARIANTS = [f"run-beta{beta}-loss{loss}" for beta in BETAS for loss in LOSSES]
CORES = ("--cores", "1")


def curve(project: Project, name: str, steps: int) -> dict[str, Any]:
    """Return the largest difference of losses over the first steps; TRL gets the same pairs in each step."""
    make_reference(project, name)
    with pinned():
        # Enough epochs for one step more than is run.
        ours = measured(sides.ours, project, run=name, steps=steps, epochs=steps + 1, log_steps=1)
        order = ours["order"][:steps]
        theirs = measured(sides.trl, project, run=name, order=order, exactly=True, at_once=(1, 8))
    losses = {"snaketune": ours["losses"], "trl": theirs["losses"]}
    if any(len(one) != steps for one in losses.values()):
        raise SystemExit(f"{len(ours['losses'])} and {len(theirs['losses'])} steps, expected {steps}")
    return {
        "curve_max_abs_diff_vs_trl": max(abs(one - other) for one, other in zip(*losses.values(), strict=True)),
        "data": name,
        "pairs_by_step": [len(step) for step in order],
        "losses": losses,
    }


def speed(rounds: int, project: Project, name: str) -> dict[str, Any]:
    """Time one epoch and one reference pass on each side: pairs/s, and memory of the training process."""
    make_reference(project, name)
    order: list[list[int]] = []

    def ours() -> dict[str, Any]:
        found = measured(sides.ours, project, run=name)
        # TRL takes the pairs in the order of our first round.
        order[:] = order or found["order"]
        return found

    def theirs(at_once: tuple[int, int]) -> dict[str, Any]:
        return measured(sides.trl, project, run=name, order=order, at_once=at_once)

    at_once = {"trl": AT_ONCE[name], "trl, defaults": DEFAULT_AT_ONCE}
    calls = {
        "snaketune": ours,
        "snaketune, reference": partial(measured, sides.ours_reference, project, run=name),
        **{side: partial(theirs, pairs) for side, pairs in at_once.items()},
    }
    with pinned():
        found = in_turn(rounds, calls, lambda one: f"{name} {one['pairs_per_s']:.2f} pairs/s")
    passes = {"snaketune": found["snaketune, reference"]}
    passes |= {side: [one["reference"] for one in found[side]] for side in at_once}
    trainings = {side: found[side] for side in passes}
    train, memory = medians(trainings, "pairs_per_s"), medians(trainings, "peak_rss_bytes")
    reference = medians(passes, "pairs_per_s")
    ratios = {}
    for side in at_once:
        peer = f"{side.replace(', ', '_')}_{name}"
        ratios |= {
            f"train_speedup_vs_{peer}": train["snaketune"] / train[side],
            f"ref_speedup_vs_{peer}": reference["snaketune"] / reference[side],
            f"peak_rss_ratio_vs_{peer}": memory["snaketune"] / memory[side],
        }
    return ratios | {
        "pairs": found["snaketune"][0]["pairs"],
        "pairs_per_s": train,
        "reference_pairs_per_s": reference,
        "peak_rss_gb": {side: bytes_ / 1e9 for side, bytes_ in memory.items()},
        "pairs_at_once": at_once,
        "rounds": found,
    }


def sweep(project: Project, name: str, raced: str, **training: float) -> dict[str, Any]:
    """Time eight variants, four betas by two losses: from an SFT model and pairs to the metrics of all eight.

    Ours by the workflow, `snakemake --cores 1`, from raw pairs to eight models with their run.json: preparation, one reference
    pass for all, and a process or three for each training. TRL's in one process, which spares it seven starts: a trainer for
    each variant, which prepares the data and computes the reference as it does by itself, or takes it from the cache of a
    trainer before it. Variants of one loss differ in a factor alone, so TRL trains the first variant, and then one of each
    loss, which is counted for the others. Both sides once; minutes need no median.

    With a race, ours trains and evaluates on other pairs, the run `raced`. How good its winner is follows from a sweep without
    a race on the same pairs.

    Args:
        training: epochs and learning_rate of both sides, if not those of the runs.
    """
    project = replace(project, config=deepcopy(project.config))
    for run in (name, raced):
        project.config["dpo"][run]["training"] |= training
    make_reference(project, name)
    settings = {key: project.config["dpo"][name]["training"][key] for key in ("epochs", "learning_rate")}
    longer = f"_{settings['epochs']}_epochs" if settings["epochs"] > 1 else ""
    with pinned():
        ours = run_ours(project, name, project.folder / f"sweep{longer}")
        race = run_ours(project, raced, project.folder / f"race{longer}", RACE)
        trained = [{"loss": LOSSES[0], "beta": BETAS[0]}, *({"loss": loss, "beta": BETAS[1]} for loss in LOSSES)]
        started = time.perf_counter()
        theirs = measured(sides.trl_sweep, project, run=name, variants=trained, at_once=AT_ONCE[SWEPT], **settings)
        seconds = time.perf_counter() - started
    later = [run["seconds"] for run in theirs["runs"][1:]]
    # Its start and the first variant once; the others are as long as a later one of their loss.
    whole = seconds - sum(later) + len(BETAS) * sum(later) - later[0]
    steps = {
        side: sum(run["steps"] for run in found["runs"].values()) for side, found in (("all", ours), ("race", race))
    }
    return {
        f"sweep8_speedup_vs_trl{longer}": whole / ours["seconds"],
        f"sweep8_race_speedup_vs_trl{longer}": whole / race["seconds"],
        f"race_share_of_steps{longer}": steps["race"] / steps["all"],
        "race_winner": rank_of_winner(project, raced, project.folder / f"race{longer}"),
        "data": SWEPT,
        "training": settings,
        "seconds": {
            "snaketune": ours["seconds"],
            "in its steps": ours["step_seconds"],
            "with a race": race["seconds"],
            "trl": whole,
            "trl, measured": seconds,
        },
        "snaketune": ours,
        "race": race,
        "trl": theirs,
    }


def run_ours(project: Project, name: str, folder: Path, race: dict[str, Any] | None = None) -> dict[str, Any]:
    """Time the workflow in a project that has only the SFT model and its tokenizer."""
    folder.mkdir()
    for file in (f"{name}.jsonl", "chats.jsonl"):
        shutil.copy(project.folder / file, folder)
    write_config(project, name, folder, race)
    snakemake(folder, "--", "results/sft/start/manifest.json", "results/tokenizer/shared/manifest.json")
    started = time.perf_counter()
    snakemake(folder, "--", *(f"results/dpo/{variant}/manifest.json" for variant in VARIANTS))
    seconds = time.perf_counter() - started
    made = [variant for variant in VARIANTS if (folder / "results/dpo" / variant / "manifest.json").is_file()]
    if made != VARIANTS:
        raise SystemExit(f"{len(made)} variants were trained, expected {len(VARIANTS)}")
    found = {}
    for variant in VARIANTS:
        own = folder / "results/dpo" / variant
        manifest, run = (json.loads((own / f"{file}.json").read_text()) for file in ("manifest", "run"))
        last = run["history"][-1]
        of_steps = last["epoch"] * manifest["counts"]["tokens_per_epoch"] / run["tokens_per_second_median"]
        found[variant] = {"steps": manifest["counts"]["steps"], "steps_s": of_steps, "last": last}
    return {"seconds": seconds, "step_seconds": sum(one["steps_s"] for one in found.values()), "runs": found}


def write_config(
    project: Project, name: str, folder: Path, race: dict[str, Any] | None, evaluated: bool = False
) -> None:
    """Write the sweep's config. Args: race: with held-out rows for it; evaluated: evaluate the variants on these rows."""
    config = deepcopy(project.config)
    run = config["dpo"][name]
    config["corpora"] = {corpus: config["corpora"][corpus] for corpus in (run["corpus"], "chats")}
    if race or evaluated:
        config["corpora"][run["corpus"]]["held_out"] = HELD_OUT
    grid = {"grid": {"beta": list(BETAS), "loss": list(LOSSES)}} | ({"race": race} if race else {})
    config["dpo"] = {"run": run | grid}
    if evaluated:
        rows = {"preferences": [run["corpus"]], "packing": run["packing"]}
        config["eval"] = {"all": {"models": ["dpo:run"]} | rows}
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def rank_of_winner(project: Project, name: str, folder: Path) -> dict[str, Any]:
    """Train all variants of a race to their ends, and compare its winner with them on the held-out pairs.

    Returns its rank and score, the best one's, the 95% interval of how much that is better, pair by pair, and all scores.
    """
    decisions = json.loads((folder / f"results/race/dpo-run@{RACE['rungs'][-1]}/decisions/race.json").read_text())
    write_config(project, name, folder, None, evaluated=True)
    snakemake(folder)
    evaluations = {variant: result_at(folder / f"results/eval/all/dpo-{variant}/manifest.json") for variant in VARIANTS}
    rows = {variant: row_scores(evaluation, RACE["metric"]) for variant, evaluation in evaluations.items()}
    check_rows(rows)
    by_row = {variant: scores for variant, (_, scores) in rows.items()}
    ranking = by_mean(by_row)
    winner = next(variant for variant in ranking if f"dpo/{variant}" not in decisions["paused"])
    scores = {variant: float(by_row[variant].mean()) for variant in ranking}
    return {
        "rank": 1 + ranking.index(winner),
        "winner": scores[winner],
        "best": scores[ranking[0]],
        "best_is_better_by": difference_bounds(by_row[ranking[0]] - by_row[winner], 0.025),
        "scores": scores,
    }


def snakemake(folder: Path, *arguments: str) -> None:
    checked(processes.snakemake(folder, *SNAKEFILE, *CORES, *arguments, env=environment(folder / "cache")))
