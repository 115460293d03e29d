"""Previews of the sources of a config's corpora."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from snaketune.preview.config_corpora import PreviewedCorpus
from snaketune.preview.rendered_rows import load_renderer
from snaketune.preview.source_preview import SourcePreview, preview_source


def preview_config(content: str) -> Iterator[SourcePreview]:
    """Yield a preview of each source in the text from `corpora_of`.

    Raises:
        SnaketuneError: a template or tokenizer can't be read.
    """
    cached_renderer = cache(load_renderer)
    for one in json.loads(content):
        corpus = PreviewedCorpus.model_validate(one)
        template = Path(corpus.chat_template) if corpus.chat_template else None
        # The tokenizer if it exists, or the folder that it will be adopted from.
        folders = (Path(folder) for folder in (corpus.tokenizer, corpus.adopt) if folder)
        tokenizer = next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)
        renderer = cached_renderer(template, tokenizer)
        if template is None and tokenizer is None and corpus.adopt:
            renderer = renderer.as_substitute_for(corpus.adopt)
        for number in range(1, len(corpus.content.sources) + 1):
            yield preview_source(corpus.corpus, number, corpus.content, renderer, corpus.train_on, corpus.lengths)
