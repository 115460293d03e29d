"""The picture of a diagnosis: by how much each change moves the speed, from its slowest round to its fastest."""

import io
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

GAINS, LOSES, OFF = "#0072b2", "#d55e00", "#868d98"
ROW, WIDTH = 0.34, 7.5
SETTINGS = {
    "svg.fonttype": "none",
    # Ids that are the same for the same numbers.
    "svg.hashsalt": "snaketune",
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def attribution_svg(found: dict[str, Any]) -> str:
    """SVG. Args: found: as `diagnosis.attribution` has it."""
    rows = [row for row in found["rows"][1:] if row["fits"]]
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, 1.2 + ROW * max(1, len(rows))), layout="constrained")
        axes = figure.subplots()
        for place, row in enumerate(rows):
            gain = row["gain_percent"]
            colour = OFF if not row["comparable"] else GAINS if gain["median"] >= 0 else LOSES
            axes.barh(place, gain["median"], color=colour, height=0.6)
            axes.plot([gain["least"], gain["most"]], [place, place], color="#1f2430", linewidth=1)
        axes.set_yticks(
            range(len(rows)), [row["variant"] + ("" if row["comparable"] else " (other loss)") for row in rows]
        )
        axes.invert_yaxis()
        axes.axvline(0, color="#1f2430", linewidth=0.8)
        against = "with all changes above" if found["mode"] == "add-one-in" else "baseline"
        axes.set_xlabel(f"tokens per second over the {against}, percent; lines from the slowest round to the fastest")
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return written.getvalue()
