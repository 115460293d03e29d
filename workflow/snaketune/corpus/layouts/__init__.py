"""Raw rows to canonical rows: by the columns of a known layout, or by the `fields` that the config maps.

`canonical` does this for the rows of a file: each row is recognised (`recognise`), read by its layout (`readers`, which lists
them), repaired where the config says so, and checked (`validation`).

`answer` and `task` columns become labels unless they are the response itself, `history` is the turns before the prompt, a
`system` column is the system turn, and a `tools` column holds the tools that the prompt offers. Context and choices beside a
prompt are added to it, reasoning beside a response to the response (`prompt_columns`). A null column counts as absent; other
columns that aren't read are reported (`unread`). Lists of turns may be JSON in a text, as in a CSV. All functions raise
Malformed for what they can't read; `where` in their arguments is the place of a value, for messages.
"""
