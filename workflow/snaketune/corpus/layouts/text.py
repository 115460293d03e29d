"""Documents, one per row, in corpora of kind text; those that are too long are cut."""

from snaketune.corpus.reading.text_files import chunk_end
from snaketune.corpus.rows import TEXT, Conversation, Malformed, Outcome
from snaketune.corpus.values.cells import wrong_type
from snaketune.corpus.values.row_file import RowFile
from snaketune.corpus.values.schema import Column, Schema, Values, Variant


def read(values: Values, file: RowFile) -> list[Outcome]:
    text, name = values["text"], file.names["text"]
    if not isinstance(text, str):
        raise wrong_type(name, text)
    if not text or text.isspace():
        raise Malformed("empty_document", f"{name} has no text")
    notes = ("cut_document",) if chunk_end(text) < len(text) else ()
    rows: list[Outcome] = []
    while text:
        chunk, text = text[: chunk_end(text)], text[chunk_end(text) :]
        # A chunk may be only whitespace.
        if not chunk.isspace():
            rows.append(Conversation(messages=[{"role": TEXT, "content": chunk}], notes=notes))
    return rows


SCHEMA = Schema(TEXT, read, Variant("text", Column("text", "text")), kinds=(TEXT,), labelled=False)
