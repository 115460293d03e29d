"""Typed models of every config key. All validation of a config happens here, with errors that name the key, the value and what
was expected.

`load.py` reads a config, expands `extends` and `grid`, and checks references between sections (references.py); `workflow.py`
is the model of the whole file. The models import nothing heavy, since every job imports them.
"""
