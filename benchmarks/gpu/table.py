"""The results of a call of the GPU benchmark as Markdown."""

from typing import Any

from benchmarks.results import markdown

# Keys that identify an entry, its figures with heading and format, and the keys that only some entries have.
WHAT = ("what", "prompt_to_completion", "case", "precision", "peer", "driven_by")
FIGURES = {
    "tokens/s": ("tokens_per_s", "{:,.0f}"),
    "pairs/s": ("pairs_per_s", "{:.1f}"),
    "MFU": ("mfu", "{:.1%}"),
    "s a step": ("step_s", "{:.3f}"),
    "rows": ("rows", "{}"),
    "GB": ("peak_memory_gb", "{:.1f}"),
    "GB expected": ("expected_memory_gb", "{:.1f}"),
    "compiled anew": ("graphs_compiled_after_warm_up", "{}"),
}
REST = (
    "deterministic",
    "same_digest",
    "largest_loss_difference",
    "held_out_loss",
    "responses",
    "out_of_memory_at_rows",
)


def table(found: dict[str, list[dict[str, Any]]], about: dict[str, Any]) -> str:
    """Return a line on machine and date, the count of right cases per kernel, and a row for each other entry."""
    [facts] = found.get("facts here") or [{}]
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    text = f"{facts.get('device', 'unknown')}, {about['date']}, {versions}: `{about['command']}`\n\n"
    kernels, rows = [], []
    for part, entries in found.items():
        if part.startswith("kernel "):
            wrong = [f"{_what(entry)}: {_why(entry)}" for entry in entries if entry["status"] != "right"]
            right = f"{len(entries) - len(wrong)} of {len(entries)}"
            kernels.append((part.removeprefix("kernel "), right, "; ".join(wrong)))
        elif part != "facts here":
            rows += [_row(part, entry) for entry in entries]
    if kernels:
        text += markdown(("kernel", "right", "not right"), kernels) + "\n\n"
    return text + markdown(("part", "status", *FIGURES, ""), rows) + "\n"


def _row(part: str, entry: dict[str, Any]) -> tuple[str, ...]:
    figures = [how.format(entry[key]) if entry.get(key) is not None else "" for key, how in FIGURES.values()]
    rest = ", ".join(f"{key} {entry[key]}" for key in REST if entry.get(key) is not None)
    if entry["status"] not in ("measured", "right"):
        rest = _why(entry)
    return ", ".join(filter(None, [part, _what(entry)])), entry["status"], *figures, rest


def _what(entry: dict[str, Any]) -> str:
    return ", ".join(str(entry[key]) for key in WHAT if entry.get(key))


def _why(entry: dict[str, Any]) -> str:
    why = entry.get("why") or f"forward {entry.get('forward', 0):.1e}, backward {entry.get('backward', 0):.1e}"
    return f"{entry['status']}: {' '.join(str(why).split())[:200]}".replace("|", "\\|")
