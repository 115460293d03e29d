"""What one text says otherwise than another, word by word.

A page of answers costs milliseconds. What costs more than that is shown unmarked: two long texts without a common beginning.
"""

import re
from difflib import SequenceMatcher

# Words that are compared with each other at most; the comparison is of all pairs of them.
MOST_WORDS = 300
SAME, ADDED, REMOVED = "same", "added", "removed"
# With the space behind it, so that two other words with a space between them are one change.
WORDS = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")


def changed(before: str, after: str) -> list[tuple[str, str]]:
    """`after` in pieces, with what it no longer says: text, and whether it is `same`, `added` or `removed`.

    >>> changed("Sure! The answer is 7.", "The answer is 8.")
    [('Sure! ', 'removed'), ('The answer is ', 'same'), ('7', 'removed'), ('8', 'added'), ('.', 'same')]
    """
    old, new = WORDS.findall(before), WORDS.findall(after)
    start = _common(old, new)
    end = _common(old[start:][::-1], new[start:][::-1])
    middle_old, middle_new = old[start : len(old) - end], new[start : len(new) - end]
    if len(middle_old) > MOST_WORDS or len(middle_new) > MOST_WORDS:
        return [(after, SAME)]
    pieces = [("".join(old[:start]), SAME)]
    matcher = SequenceMatcher(None, middle_old, middle_new, autojunk=False)
    for what, old_from, old_to, new_from, new_to in matcher.get_opcodes():
        if what == "equal":
            pieces.append(("".join(middle_new[new_from:new_to]), SAME))
        else:
            pieces += [("".join(middle_old[old_from:old_to]), REMOVED), ("".join(middle_new[new_from:new_to]), ADDED)]
    pieces.append(("".join(new[len(new) - end :]), SAME))
    return [piece for piece in pieces if piece[0]]


def _common(one: list[str], other: list[str]) -> int:
    """How many words both begin with."""
    same = 0
    for left, right in zip(one, other):
        if left != right:
            break
        same += 1
    return same
