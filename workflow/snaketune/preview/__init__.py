"""Previews: the rows of files as the model would see them, before any result is computed.

`python -m snaketune preview FILES` (source_preview.py) reads a sample and proposes the config entry to paste (config_entry.py);
`snakemake preview` (config_corpora.py) shows the rows of a config's corpora. Here guessing is allowed; in a run it isn't.
"""
