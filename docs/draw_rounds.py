"""Draw docs/rounds.svg, the chart of the rounds of config/recipes/rounds.yaml, from its results:

snakemake --configfile config/recipes/rounds.yaml && PYTHONPATH=workflow python docs/draw_rounds.py
"""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from snaketune.report.charts.round_charts import KEY, rounds_chart
from snaketune.report.charts.style import PANEL_HEIGHT, PANEL_WIDTH, SETTINGS
from snaketune.report.data.results import ResultSet
from snaketune.report.data.rounds import rounds_of
from snaketune.stages.job_files import job_file_of
from snaketune.stages.loaded_job import read_job

OUT = Path(__file__).with_name("rounds.svg")


def main() -> None:
    job = read_job(job_file_of("report", ""))
    manifests = job.files["manifests"]
    runs = [path for manifest in manifests if (path := manifest.with_name("run.json")).is_file()]
    chart = rounds_chart(rounds_of(ResultSet(job.spec.jobs, manifests, runs)))
    with mpl.rc_context(SETTINGS | {"figure.facecolor": "#ffffff"}):
        figure = Figure(figsize=(1.5 * PANEL_WIDTH, 1.2 * PANEL_HEIGHT), layout="constrained")
        axes = figure.subplots()
        chart.panels[0].draw(axes)
        handles = [
            mpl.lines.Line2D([], [], color=style.hex, marker=style.marker, linestyle=style.dash)
            for style in KEY.values()
        ]
        axes.legend(handles, KEY, loc="lower right")
        axes.set_title(chart.panels[0].title, loc="left", fontsize=10, fontweight="bold")
        figure.savefig(OUT, metadata={"Date": None, "Creator": None})
    print(OUT)


if __name__ == "__main__":
    main()
