"""The report: HTML pages, figures and tables of all results.

`data/` reads manifests and logs, `judge/` concludes (the headline, findings, warnings, suggestions), `compare/` makes tables of
models, variants and earlier runs, `charts/` draws, and `page_files.py` renders the templates.
"""
