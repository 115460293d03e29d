"""Write docs/architecture.md and docs/architecture.svg from the code: packages, their imports, and what each does.

Update them with: make docs
"""

import ast
from functools import cache
from html import escape
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "workflow/snaketune"
# Data flows down this list: a package imports only from those above it.
PACKAGES = (
    "engine", "config", "artifacts", "stages", "cluster", "corpus", "tokenization", "preview", "packing", "models", "tracking",
    "servers", "training", "sampling", "evaluation", "diagnostics", "publishing", "report",
    "snakemake_adapter",
)  # fmt: skip
WIDTH, ROW, BOX, TOP = 1000, 62, 610, 20
COLOURS = (
    "#1f6f8b", "#8b5a1f", "#3f7d3a", "#7a3f7d", "#a03a3a", "#3a4ea0", "#6b6b1f", "#1f8b6f", "#8b1f5a", "#5a5a8b",
    "#8b7a1f", "#444444", "#2f5d50", "#b0651d", "#4a6fa5", "#7d3a4e", "#6b4a8b",
    "#2b6e99", "#5d7d2f",
)  # fmt: skip
PAGE = """# Architecture

How a run goes, from the config to a result:

1. **Config.** Snakemake reads a YAML file; `config/load.py` checks it and returns typed models.
2. **Planner.** `stages/plan/` turns the config into jobs. A job is one run of one stage, with a spec (its slice of the config)
   and inputs. `stages/cache/status.py` compares each job with the result on disk: current, stale or missing, and why.
3. **Job files.** `stages/job_files.py` writes each job to `results/.jobs/`. The file of a stale job gets a new modification
   time.
4. **Snakemake rules.** Each stage has one rule, in `workflow/rules/`. It depends on the job file, so exactly the stale jobs
   run, here or on a cluster (`cluster/` estimates their resources).
5. **Stage.** The rule's command, `python -m snaketune STAGE JOB_FILE`, is run by `stages/run.py`. It computes the fingerprint
   of the job; a finished result with that fingerprint is reused, unfinished work is resumed, otherwise the stage's `build`
   runs, in a work folder. Trainings start worker processes (`training/launch/`).
6. **Manifest.** The payload is published in `results/STAGE/NAME/`, and last of all its `manifest.json`: spec, inputs, counts
   and digests (`artifacts/manifest.py`). The report and later stages read results by their manifests.

Everything that one stage is, is declared in one module, `STAGE = Stage(...)` (`stages/declaration.py` lists what it holds,
`stages/table.py` names the modules). A rule, its file and that module have one name, and the module imports nothing heavy. A
small stage has its `build` beside the declaration; of a heavy one, the declaration names the module with `build` (`work`).

In the picture, each line goes from a package to one above it that it imports. Snakemake's files ask `snakemake_adapter`, and
nothing else in the package imports Snakemake. This page is written from the code by `docs/draw_architecture.py`
(`make docs`), and a test checks that it is up to date.

![Packages and imports](architecture.svg)
"""


def modules() -> dict[str, Path]:
    """Return every module by its dotted name below `snaketune`; packages by their `__init__.py`."""
    paths = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


@cache
def imported_packages() -> dict[str, set[str]]:
    """Return for each package the other packages that its modules import, inside functions too."""
    imports: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for name, path in modules().items():
        package = name.split(".")[0]
        for node in ast.walk(ast.parse(path.read_bytes())):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for imported in named:
                top, _, rest = f"{module}{imported}".partition(".")
                if top == "snaketune" and package in imports and rest.split(".")[0] in imports:
                    imports[package].add(rest.split(".")[0])
    return {package: others - {package} for package, others in imports.items()}


def first_line(path: Path) -> str:
    """Return the first paragraph of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_bytes())) or "").split("\n\n")[0].replace("\n", " ")


def picture() -> str:
    """Return the SVG: packages as boxes, imports as arcs on their right."""
    height = 2 * TOP + ROW * len(PACKAGES)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
        "<title>The packages of snaketune and their imports</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for row, (package, others) in enumerate(imported_packages().items()):
        y = TOP + row * ROW
        colour = COLOURS[row]
        lines = wrap(first_line(PACKAGE / package / "__init__.py"), 84, break_long_words=False)
        parts += [
            f'<rect x="20" y="{y}" width="{BOX}" height="{ROW - 14}" rx="6" fill="{colour}" fill-opacity="0.08"'
            f' stroke="{colour}"/>',
            f'<text x="32" y="{y + 20}" font-weight="bold" fill="{colour}">{package}</text>',
            *(
                f'<text x="140" y="{y + 20 + 17 * n}" font-size="12" fill="#333">{escape(line)}</text>'
                for n, line in enumerate(lines[:2])
            ),
        ]
        for other in sorted(others, key=PACKAGES.index, reverse=True):
            up = row - PACKAGES.index(other)
            # Lines end in the order of their starts, so that none overlaps another.
            start, end = y + 8 + 3 * (len(PACKAGES) - up), TOP + PACKAGES.index(other) * ROW + 8 + 3 * up
            reach = 20 + BOX + 30 + 36 * abs(up)
            parts.append(
                f'<path d="M{20 + BOX} {start} C{reach} {start} {reach} {end} {20 + BOX + 7} {end}" fill="none"'
                f' stroke="{colour}"><title>{package} imports {other}</title></path>'
                f'<path d="M{20 + BOX} {end} l8 -3.5 v7 z" fill="{colour}"/>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def page() -> str:
    """Return the page: how a run goes, the picture, and what each package and its sub-packages do."""
    return PAGE + "".join(map(_section, PACKAGES))


def _section(package: str) -> str:
    folder = PACKAGE / package
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_bytes())) or ""
    nested = "".join(f"- `{init.parent.name}/`: {first_line(init)}\n" for init in sorted(folder.glob("*/__init__.py")))
    return f"\n## `{package}/`\n\n{text}\n" + (f"\n{nested}" if nested else "")


if __name__ == "__main__":
    (ROOT / "docs/architecture.svg").write_text(picture(), encoding="utf-8")
    (ROOT / "docs/architecture.md").write_text(page(), encoding="utf-8")
