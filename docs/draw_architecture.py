"""Draws docs/architecture.svg and writes docs/architecture.md, from the code: the rooms of the package and who imports whom.

Write them again with: make docs
"""

import ast
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "workflow/snaketune"
# Data flows down this list: a room imports from those above it, and from no other.
ROOMS = (
    "config",
    "artifacts",
    "stages",
    "cluster",
    "corpus",
    "tokenization",
    "preview",
    "packing",
    "models",
    "tracking",
    "training",
    "evaluation",
    "diagnostics",
    "publishing",
    "report",
)
WIDTH, ROW, BOX, TOP = 1000, 62, 610, 20
COLOURS = (
    "#1f6f8b",
    "#8b5a1f",
    "#3f7d3a",
    "#7a3f7d",
    "#a03a3a",
    "#3a4ea0",
    "#6b6b1f",
    "#1f8b6f",
    "#8b1f5a",
    "#5a5a8b",
    "#8b7a1f",
    "#444444",
    "#2f5d50",
    "#b0651d",
    "#4a6fa5",
)

HEAD = "| module | what it is |\n|---|---|\n"
PAGE = f"""# Architecture

Written by `docs/draw_architecture.py` from the code (`make docs`); a test holds it equal. A line goes from a room to one that
it imports: always upward, since data flows down. Snakemake's files import `config`, `stages`, `cluster`, `preview`,
`publishing` and `report`, and nothing in the package imports Snakemake.

![Rooms and imports](architecture.svg)

Everything that one stage is stands in one place: `STAGE = Stage(...)` in its module, beside its `build`
(`stages/declaration.py` says what it holds, `stages/table.py` finds them all). A rule, its file under `workflow/rules/` and
that module have one name; the module imports nothing heavy, and what `build` calls is in modules beside it.
`workflow/rules/common.smk` looks up the inputs of every rule in `stages/planner.py`, which finds what is stale
(`stages/cache/status.py`) and writes a file for each job (`stages/job_files.py`).

## The package itself

{HEAD}"""


def modules() -> dict[str, Path]:
    """By dotted name below the package, every module; a room or sub-room by its `__init__.py`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_rooms() -> dict[str, set[str]]:
    """By room, the other rooms that its modules import, inside functions too."""
    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    for name, path in modules().items():
        room = name.split(".")[0]
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for imported in names:
                package, _, rest = imported.partition(".")
                if package == "snaketune" and room in found and rest.split(".")[0] in found:
                    found[room].add(rest.split(".")[0])
    return {room: others - {room} for room, others in found.items()}


def first_line(path: Path) -> str:
    """What a module's docstring begins with."""
    return (ast.get_docstring(ast.parse(path.read_bytes())) or "").split("\n\n")[0].replace("\n", " ")


def picture() -> str:
    """Rooms as boxes, imports as arcs on their right."""
    height = 2 * TOP + ROW * len(ROOMS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
        "<title>The rooms of snaketune and their imports</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for row, (room, others) in enumerate(imported_rooms().items()):
        y = TOP + row * ROW
        colour = COLOURS[row]
        said = _wrapped(first_line(PACKAGE / room / "__init__.py"), 84)
        parts += [
            f'<rect x="20" y="{y}" width="{BOX}" height="{ROW - 14}" rx="6" fill="{colour}" fill-opacity="0.08"'
            f' stroke="{colour}"/>',
            f'<text x="32" y="{y + 20}" font-weight="bold" fill="{colour}">{room}</text>',
            *(
                f'<text x="140" y="{y + 20 + 17 * n}" font-size="12" fill="#333">{escape(line)}</text>'
                for n, line in enumerate(said[:2])
            ),
        ]
        for other in sorted(others, key=ROOMS.index, reverse=True):
            up = row - ROOMS.index(other)
            # Lines end in the order of where they come from, so that none lies on another.
            start, end = y + 8 + 3 * (len(ROOMS) - up), TOP + ROOMS.index(other) * ROW + 8 + 3 * up
            reach = 20 + BOX + 30 + 36 * abs(up)
            parts.append(
                f'<path d="M{20 + BOX} {start} C{reach} {start} {reach} {end} {20 + BOX + 7} {end}" fill="none"'
                f' stroke="{colour}"><title>{room} imports {other}</title></path>'
                f'<path d="M{20 + BOX} {end} l8 -3.5 v7 z" fill="{colour}"/>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def page() -> str:
    """The picture, and each room's modules with the first sentence of each."""
    parts = [PAGE]
    parts += [
        _line(path, path.name) for path in modules().values() if path.parent == PACKAGE and path.stem != "__init__"
    ]
    for room in ROOMS:
        parts.append(f"\n## `{room}/`\n\n{first_line(PACKAGE / room / '__init__.py')}\n\n{HEAD}")
        for name, path in modules().items():
            if name.startswith(f"{room}."):
                parts.append(_line(path, path.relative_to(PACKAGE / room).as_posix().removesuffix("__init__.py")))
    return "".join(parts)


def _line(path: Path, shown: str) -> str:
    return f"| `{shown}` | {first_line(path).replace('|', '&#124;')} |\n"


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


if __name__ == "__main__":
    (ROOT / "docs/architecture.svg").write_text(picture(), encoding="utf-8")
    (ROOT / "docs/architecture.md").write_text(page(), encoding="utf-8")
