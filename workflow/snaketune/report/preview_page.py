"""The HTML page of a preview: the first rows of data files as the model would see them. It loads nothing and has no scripts."""

import numpy as np

from snaketune.corpus.excerpts import excerpt
from snaketune.corpus.rows import TEXT
from snaketune.preview.config_entry import conditions
from snaketune.preview.source_preview import SourcePreview
from snaketune.report.html import render


def page(previews: list[SourcePreview]) -> str:
    """Render the previews of all files as one page."""
    helpers = {"conditions": conditions, "excerpt": excerpt, "quantile": np.quantile, "text_kind": TEXT}
    return render("preview", previews=previews, **helpers)
