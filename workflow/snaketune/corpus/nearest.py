"""Of a row in no known layout: which layout comes nearest, and what it lacks."""

from difflib import get_close_matches
from functools import lru_cache

from snaketune.corpus.exchanges import INSTRUCTION_RESPONSES, PROMPT_AND_RESPONSE, PROMPT_TURNS
from snaketune.corpus.pairs import PAIR_COLUMNS
from snaketune.corpus.unpaired import LABEL_COLUMNS
from snaketune.corpus.votes import ANSWER_COLUMNS, STRENGTH_COLUMNS, VERDICT_COLUMNS

PROMPTS = tuple(dict.fromkeys(prompt for prompt, _ in PROMPT_AND_RESPONSE))
RESPONSES = tuple(dict.fromkeys(response for _, response in PROMPT_AND_RESPONSE))
ASKS = (*PROMPTS, "instruction", *PROMPT_TURNS)
# For each layout the columns that it needs, each by the names that it may have; the first is the one to be shown.
NEEDS = {
    "pairs": (ASKS, *(tuple(dict.fromkeys(side)) for side in zip(*PAIR_COLUMNS))),
    "votes": (ASKS, *zip(*ANSWER_COLUMNS), (*VERDICT_COLUMNS, *STRENGTH_COLUMNS)),
    "unpaired": (ASKS, (*RESPONSES, *INSTRUCTION_RESPONSES), LABEL_COLUMNS),
    "messages": (("messages",),),
    "sharegpt": (("conversations", "conversation"),),
    "alpaca": (("instruction",), INSTRUCTION_RESPONSES),
    "instances": (("instruction",), ("instances",)),
    "prompt-response": (PROMPTS, RESPONSES),
    "message-tree": (("message_id",), ("parent_id",), ("role",), ("text",)),
}
ALIKE = 0.75


@lru_cache(maxsize=1024)
def nearest(columns: tuple[str, ...], layouts: frozenset[str]) -> str:
    """The nearest layout in words; nothing if no column is any that a layout needs.

    >>> nearest(("prompt", "chosen"), frozenset({"pairs", "votes"}))
    'nearest: pairs (prompt, chosen, rejected); `rejected` is missing'

    Args:
        layouts: those that make rows of the kind that the corpus holds.
    """
    best: tuple[int, int, str] | None = None
    for layout, needs in NEEDS.items():
        if layout not in layouts:
            continue
        found = [_found(names, columns) for names in needs]
        lacks = [names[0] for names, name in zip(needs, found) if name is None]
        # Another spelling counts as half of a column that is there.
        other = [
            (name, found_) for names, found_ in zip(needs, found) for name in names[:1] if found_ not in (None, *names)
        ]
        if len(lacks) == len(needs):
            continue
        said = [f"`{name}` is missing" for name in lacks]
        said += [f"`{theirs}` may be what is called `{ours}` here" for ours, theirs in other]
        shown = ", ".join(names[0] if name is None or name not in names else name for names, name in zip(needs, found))
        order = (2 * len(lacks) + len(other), -len(needs), f"nearest: {layout} ({shown}); {', '.join(said)}")
        best = order if best is None or order[:2] < best[:2] else best
    return best[2] if best else ""


def _found(names: tuple[str, ...], columns: tuple[str, ...]) -> str | None:
    """The column that has one of these names, or else one that is spelled much like it."""
    exact = next((name for name in names if name in columns), None)
    if exact:
        return exact
    by_spelling = {column.casefold(): column for column in columns}
    for name in names:
        if close := get_close_matches(name, by_spelling, 1, ALIKE):
            return by_spelling[close[0]]
    return None
