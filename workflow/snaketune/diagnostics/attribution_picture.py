"""The figure of a diagnosis: the change in speed of each variant, from its slowest round to its fastest."""

import io
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

GAINS, LOSES, OFF, INK = "#0072b2", "#d55e00", "#868d98", "#1f2430"
ROW, WIDTH = 0.34, 7.5
SETTINGS = {
    "svg.fonttype": "none",
    # Ids that are the same for the same figures.
    "svg.hashsalt": "snaketune",
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def attribution_svg(result: dict[str, Any]) -> str:
    """Return the figure as SVG. Args: result: as `diagnosis.attribution` returns it."""
    rows = [row for row in result["rows"][1:] if row["fits"]]

    def draw(axes: Axes) -> None:
        for position, row in enumerate(rows):
            gain = row["gain_percent"]
            colour = OFF if not row["comparable"] else GAINS if gain["median"] >= 0 else LOSES
            axes.barh(position, gain["median"], color=colour, height=0.6)
            axes.plot([gain["least"], gain["most"]], [position, position], color=INK, linewidth=1)
        names = [row["variant"] + ("" if row["comparable"] else " (other loss)") for row in rows]
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.axvline(0, color=INK, linewidth=0.8)
        against = "with all changes above" if result["mode"] == "add-one-in" else "baseline"
        axes.set_xlabel(f"tokens per second over the {against}, percent; lines from the slowest round to the fastest")

    return svg(draw, height=1.2 + ROW * max(1, len(rows)))


def svg(draw: Callable[[Axes], None], height: float) -> str:
    """Return what `draw` draws as SVG. Args: height: in inches."""
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure.subplots())
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return written.getvalue()
