"""The page of a preview: what files hold, as the model would see it. One file that fetches nothing and runs nothing."""

import numpy as np

from snaketune.corpus.excerpts import excerpt
from snaketune.corpus.rows import TEXT
from snaketune.preview.config_entry import conditions
from snaketune.preview.source_preview import SourcePreview
from snaketune.report.charts.style import COLOURS
from snaketune.report.html import environment


def page(looks: list[SourcePreview]) -> str:
    """All looks, one after the other."""
    return (
        environment()
        .get_template("preview.html.jinja")
        .render(
            looks=looks, colours=COLOURS, conditions=conditions, excerpt=excerpt, quantile=np.quantile, text_kind=TEXT
        )
    )
