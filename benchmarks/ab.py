"""Is B faster than A? The same training on two checkouts, or in two environments, in turns: make ab BASE=<commit>

    make ab BASE=HEAD~5                                  that commit beside the working tree
    python -m benchmarks.ab --base-python old/bin/python the working tree in two environments, as before a library's upgrade
    python -m benchmarks.ab --base main --config mine.yaml --run dpo:support --rounds 5

Each side has a folder of its own with its code; rows are made once, then rounds of A B, B A, A B … train from nothing. Compared
is what run.json says: the median of tokens per second, the peak of memory, the last loss. The verdict, a table and all figures
go to results/bench/ab.json.
"""

import argparse
import json
import math
import shutil
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from scipy.stats import t

from benchmarks.processes import checked, copy_code, snakemake
from benchmarks.results import ROOT, made_on, markdown, write_json

FOUND = ROOT / "results/bench/ab.json"
# Percent; less is none.
SAME_MEMORY, SAME_LOSS = 1.0, 0.05
Rounds = list[tuple[dict[str, float], dict[str, float]]]


def side(folder: Path, commit: str, config: Path) -> Path:
    """Create a folder with the config and the code of a commit (empty: of the working tree)."""
    copy_code(folder, commit)
    shutil.copy(config, folder / "ab.yaml")
    return folder


def short(config: Path, run: str, folder: Path) -> Path:
    """Write the default config without evaluations, and with a third of an epoch of the run."""
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    section, _, name = run.partition(":")
    settings[section][name]["training"]["epochs"] = 0.3
    settings = {key: value for key, value in settings.items() if key not in ("eval", "report")}
    (folder / "ab.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return folder / "ab.yaml"


def train(folder: Path, python: str, run: str) -> dict[str, float]:
    """Train from scratch and return figures of its run.json."""
    section, _, name = run.partition(":")
    out = f"results/{section}/{name}"
    for made in (out, f"results/.work/{section}"):
        shutil.rmtree(folder / made, ignore_errors=True)
    arguments = ("--configfile", "ab.yaml", "--cores", "all", "--", f"{out}/manifest.json")
    checked(snakemake(folder, *arguments, python=python))
    facts = json.loads((folder / out / "run.json").read_text(encoding="utf-8"))
    return {
        "tokens_per_second": facts["tokens_per_second_median"],
        "peak_memory_gb": facts["peak_memory_gb"],
        "loss": facts["history"][-1]["loss"],
    }


def verdict(rounds: Rounds) -> dict[str, Any]:
    """Return the verdict over rounds (A, B). A side is faster if the interval of the rounds' ratios excludes 1.

    >>> a = {"tokens_per_second": 100.0, "peak_memory_gb": 2.0, "loss": 3.0}
    >>> made = [(a, a | {"tokens_per_second": speed}) for speed in (111.0, 112.0, 113.0)]
    >>> verdict(made)["said"]
    'B 12.0% ± 2.2% faster, memory equal, loss equal to 0.00%'
    """
    logs = [math.log(b["tokens_per_second"] / a["tokens_per_second"]) for a, b in rounds]
    middle = statistics.fmean(logs)
    # Half-width of the 95% interval of the mean, by Student's t.
    spread = t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    percent, around = 100 * (math.exp(middle) - 1), 100 * (math.exp(spread) - 1)
    if abs(middle) <= spread:
        speed = f"no difference in speed shown ({percent:+.1f}% ± {around:.1f}%)"
    else:
        speed = f"B {abs(percent):.1f}% ± {around:.1f}% {'faster' if percent > 0 else 'slower'}"
    memory, loss = (
        100 * (statistics.median(b[key] for _, b in rounds) / statistics.median(a[key] for a, _ in rounds) - 1)
        for key in ("peak_memory_gb", "loss")
    )
    said = [
        speed,
        "memory equal" if abs(memory) <= SAME_MEMORY else f"memory {memory:+.1f}%",
        f"loss equal to {abs(loss):.2f}%" if abs(loss) <= SAME_LOSS else f"loss {loss:+.2f}%: not the same training",
    ]
    percents = {"percent": percent, "around": around, "memory_percent": memory, "loss_percent": loss}
    return {"said": ", ".join(said)} | percents


def table(rounds: Rounds) -> str:
    """Return a table of medians with minimum and maximum."""

    def cell(values: list[float]) -> str:
        return f"{statistics.median(values):,.4g} ({min(values):,.4g} to {max(values):,.4g})"

    rows = [(key, *(cell([one[key] for one in of]) for of in zip(*rounds))) for key in rounds[0][0]]
    return markdown(("", "A", "B"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", default="", help="commit that A is; default: the working tree too")
    parser.add_argument("--base-python", default=sys.executable, help="A's Python (default: this one)")
    parser.add_argument("--config", type=Path, help="default: the embedded one, a third of an epoch of it")
    parser.add_argument("--run", default="sft:demo", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: one round can't show the noise; give 2 or more")
    if not options.base and options.base_python == sys.executable:
        parser.error("A and B would be the same; give --base COMMIT (make ab BASE=COMMIT) or --base-python PYTHON")
    with TemporaryDirectory(prefix="ab-") as name:
        folder = Path(name)
        config = options.config or short(ROOT / "config/config.yaml", options.run, folder)
        sides = {
            "A": (side(folder / "A", options.base, config), options.base_python),
            "B": (side(folder / "B", "", config), sys.executable),
        }
        rounds = []
        for number in range(options.rounds):
            made = {}
            for name in ("A", "B") if number % 2 == 0 else ("B", "A"):
                made[name] = train(*sides[name], options.run)
                print(f"round {number + 1}, {name}: {made[name]['tokens_per_second']:,.0f} tokens/s", flush=True)
            rounds.append((made["A"], made["B"]))
    found = verdict(rounds)
    details = {"made": made_on("benchmarks.ab"), "base": options.base, "rounds": rounds, "verdict": found}
    write_json(FOUND, details, indent=1)
    print(f"{table(rounds)}\n\n{found['said']}")


if __name__ == "__main__":
    main()
