"""The training templates that TRL ships for chat templates of well-known models: the same text, with {% generation %} markers.

They are files of the package `trl`, `NAME.jinja` and `NAME_training.jinja`, found without importing it (and torch with it).
Some write more than the original (the reasoning of earlier turns); whether one is used for a conversation is decided by
comparing the two texts, see `chat`.
"""

from importlib.metadata import PackageNotFoundError, files

SUFFIX = "_training.jinja"


def training_template(template: str) -> tuple[str, str] | None:
    """Return the name and the text of TRL's training template for a chat template; None if TRL has none for it.

    Two templates are the same up to spaces at their ends, which editors change.
    """
    try:
        shipped = {path.name: path for path in files("trl") or () if path.parent.name == "chat_templates"}
    except PackageNotFoundError:
        return None
    for name in sorted(shipped):
        original = name.replace(SUFFIX, ".jinja")
        if not name.endswith(SUFFIX) or original not in shipped:
            continue
        if shipped[original].read_text(encoding="utf-8").strip() == template.strip():
            return original.removesuffix(".jinja"), shipped[name].read_text(encoding="utf-8")
    return None
