"""What benchmarks share: their options, rounds of all sides in turn, results beside their goals, and Markdown tables."""

import json
import os
import platform
import shlex
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# By key: whether to be as large or as small, and what it is to reach.
Goals = dict[str, tuple[str, float]]
Parts = dict[str, Callable[[], dict[str, Any]]]


def options_of(description: str, out: str | None, data: str, parts: Iterable[str]) -> ArgumentParser:
    """Return the parser of a benchmark that runs in rounds and parts. Args: data: what its folder of data holds."""
    parser = ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("data"), help=f"folder with {data}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument("--out", type=Path, default=out and Path(out))
    return parser


def add_precision(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--precision", choices=("auto", "float32"), default="auto",
        help="of both sides' trainings; auto: TRL trains in bfloat16, its default, if this CPU multiplies faster in it",
    )  # fmt: skip


def in_bfloat16(precision: str) -> bool:
    """Whether TRL's side trains in bfloat16: the faster data type of this CPU, by a measured product."""
    import torch

    from snaketune.engine.model.device_speed import measured_peak

    if precision != "auto":
        return False
    of_single, of_half = (
        measured_peak(torch.device("cpu"), dtype, str(dtype), torch.get_num_threads()).flops_per_second
        for dtype in (torch.float32, torch.bfloat16)
    )
    return of_half > of_single


def require(data: Path, files: Iterable[str]) -> None:
    """Exit if files below the folder of data are missing."""
    if missing := [str((data / name).resolve()) for name in files if not (data / name).is_file()]:
        sys.exit(f"error: {', '.join(missing)}: not there; put them below {data}, or name --data")


def run_parts(module: str, options: Namespace, measures: Parts, goals: Goals) -> dict[str, Any]:
    """Measure the chosen parts and write all results after each; return them with those of earlier runs."""
    details = json.loads(options.out.read_text(encoding="utf-8"))["details"] if options.out.is_file() else {}
    for part in options.only or measures:
        print(f"{part} ...", file=sys.stderr, flush=True)
        details[part] = measures[part]() | made_on(module)
        write(options.out, details, goals)
    return details


def in_turn(
    rounds: int, sides: dict[str, Callable[[], Any]], shown: Callable[[Any], str] = "{:.3f} s".format
) -> dict[str, list[Any]]:
    """Call each side once per round, one after the other; return what each returned. Args: shown: of it, what is printed."""
    found: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            found[name].append(side())
            print(f"  round {number + 1}: {name} {shown(found[name][-1])}", file=sys.stderr, flush=True)
    return found


def timed(call: Callable[[], Any]) -> Callable[[], float]:
    def seconds() -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return seconds


def medians(found: dict[str, list[Any]], key: str | None = None) -> dict[str, float]:
    """Return the median of each side, of its numbers or of the entries' `key`."""
    return {side: statistics.median(one[key] if key else one for one in some) for side, some in found.items()}


def made_on(module: str) -> dict[str, Any]:
    """Return machine, date, versions and command."""
    libraries = ("torch", "transformers", "trl", "datasets", "tokenizers", "numpy", "pyarrow")
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in libraries},
        **when(module),
    }


def when(module: str) -> dict[str, str]:
    return {"date": time.strftime("%Y-%m-%d"), "command": shlex.join(["python", "-m", module, *sys.argv[1:]])}


def figures(details: dict[str, Any], goals: Goals) -> dict[str, float]:
    found = {key: value for part in details.values() for key, value in part.items()}
    return {key: found[key] for key in goals if key in found}


def write(path: Path, details: dict[str, Any], goals: Goals) -> None:
    wanted = {key: " ".join(map(str, goal)) for key, goal in goals.items()}
    write_json(path, figures(details, goals) | {"goals": wanted, "details": details})


def write_json(path: Path, document: dict[str, Any], indent: int = 2) -> None:
    """Write a file that is replaced atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=indent) + "\n", encoding="utf-8")
    partial.replace(path)


def table(details: dict[str, Any], goals: Goals) -> str:
    """Return the table for docs/benchmarks.md."""
    found = figures(details, goals)
    measured = {key: f"{found[key]:.3g}" if key in found else "not measured" for key in goals}
    rows = [(f"`{key}`", measured[key], f"{how} {goal:g}") for key, (how, goal) in goals.items()]
    return markdown(("key", "measured", "goal"), rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; cells are strings or numbers without a pipe."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, cells))} |" for cells in rows)])


def keep_table(document: Path, name: str, text: str) -> None:
    """Write a table into a document, between `<!-- name -->` and `<!-- /name -->`.

    Raises:
        ValueError: the document has no such markers.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, found, rest = document.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{document} has no markers for the table {name}")
    document.write_text(f"{before}{begin}\n{text}\n\n{end}{after}", encoding="utf-8")
