"""Charts of rounds: how often the models are right, and how long and how far from the start their responses are."""

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from snaketune.report.charts.style import COLOURS, MUTED, Chart, Panel, Style, curve_with_intervals, cut, percentages
from snaketune.report.data.rounds import HeldOutScores, Interval, Rounds
from snaketune.text import percent

HELD_OUT, ONCE, FIRST_TRY = (
    Style(colour="sft-1"),
    Style(colour="dpo-3", marker="^"),
    Style(colour="sft-2", dash="--", marker="s"),
)
KEY = {"held-out exact match": HELD_OUT, "sampled prompts, at least once": ONCE, "at first try": FIRST_TRY}
Points = dict[int, tuple[float, Interval]]


def rounds_chart(chains: list[Rounds]) -> Chart:
    panels = []
    for chain in chains:
        for scores in chain.held_out or [None]:
            panels.append(_right(chain, scores))
        for scores in chain.held_out:
            if len(scores.tokens) > 1:
                lengths: Points = {number: (tokens, None) for number, tokens in scores.tokens.items()}
                panels.append(_over_rounds(f"{chain.name}: tokens per response", lengths, chain))
            if scores.kl:
                panels.append(_over_rounds(f"{chain.name}: KL from the start, nats per token", scores.kl, chain))
    return Chart(name="rounds", panels=panels, key=KEY)


def _right(chain: Rounds, scores: HeldOutScores | None) -> Panel:
    """How often each model is right. Args: scores: on held-out prompts, if they were evaluated."""
    sampled = {one.number: one.sampled for one in chain.rounds if one.sampled and one.sampled.shares}
    once: Points = {number: (one.at_least_once or 0.0, one.once_interval) for number, one in sampled.items()}
    first: Points = {number: (one.first_try or 0.0, None) for number, one in sampled.items()}
    exact = scores.exact if scores else {}

    def draw(ax: Axes) -> None:
        for points, style in ((once, ONCE), (first, FIRST_TRY), (exact, HELD_OUT)):
            curve_with_intervals(ax, ((number, *point) for number, point in points.items()), style)
        for number, (share, _) in exact.items():
            ax.annotate(percent(share), (number, share), xytext=(0, 7), textcoords="offset points", ha="center")
        for label, share in (scores.others if scores else {}).items():
            ax.axhline(share, color=MUTED, linewidth=0.8, linestyle=":")
            ax.annotate(
                f"{cut(label, 30)} {percent(share)}",
                (len(chain.rounds) - 1, share),
                xytext=(0, -9),
                textcoords="offset points",
                ha="right",
                color=MUTED,
            )
        ax.set_ylim(0.0, 1.05)
        percentages(ax, "y")
        _of_rounds(ax, chain)

    title = f"{chain.name}: right answers by round"
    if len(exact) > 1:
        (start, _), (end, _) = exact[min(exact)], exact[max(exact)]
        title = f"{chain.name}: {percent(start)} of {scores.corpus if scores else ''} right, then {percent(end)}"
    return Panel(title=title, draw=draw)


def _over_rounds(title: str, points: Points, chain: Rounds) -> Panel:
    def draw(ax: Axes) -> None:
        curve_with_intervals(ax, ((number, *point) for number, point in points.items()), HELD_OUT)
        highest = max(max(value, *(bounds or (value,))) for value, bounds in points.values())
        ax.set_ylim(0.0, 1.15 * highest or 1.0)
        _of_rounds(ax, chain)

    return Panel(title=title, draw=draw)


def _of_rounds(ax: Axes, chain: Rounds) -> None:
    ax.set_xlim(-0.2, len(chain.rounds) - 0.8)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("round (0: before the first)", color=COLOURS["muted"][0])
    ax.grid(False, axis="x")
