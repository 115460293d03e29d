"""Word-level diff of two responses.

A page of responses takes milliseconds. Long texts that differ in more than MAX_WORDS words are shown without a diff.
"""

import re
from difflib import SequenceMatcher

# Limit of words to compare: the cost is quadratic.
MAX_WORDS = 300
SAME, ADDED, REMOVED = "same", "added", "removed"
# Each word with its trailing space, so that consecutive changed words are one change.
WORDS = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")


def word_diff(before: str, after: str) -> list[tuple[str, str]]:
    """`after` and what was removed from `before`, as spans of text that are `same`, `added` or `removed`.

    >>> word_diff("Sure! The answer is 7.", "The answer is 8.")
    [('Sure! ', 'removed'), ('The answer is ', 'same'), ('7', 'removed'), ('8', 'added'), ('.', 'same')]
    """
    old, new = WORDS.findall(before), WORDS.findall(after)
    start = _common_prefix(old, new)
    end = _common_prefix(old[start:][::-1], new[start:][::-1])
    middle_old, middle_new = old[start : len(old) - end], new[start : len(new) - end]
    if len(middle_old) > MAX_WORDS or len(middle_new) > MAX_WORDS:
        return [(after, SAME)]
    spans = [("".join(old[:start]), SAME)]
    matcher = SequenceMatcher(None, middle_old, middle_new, autojunk=False)
    for what, old_from, old_to, new_from, new_to in matcher.get_opcodes():
        if what == "equal":
            spans.append(("".join(middle_new[new_from:new_to]), SAME))
        else:
            spans += [("".join(middle_old[old_from:old_to]), REMOVED), ("".join(middle_new[new_from:new_to]), ADDED)]
    spans.append(("".join(new[len(new) - end :]), SAME))
    return [span for span in spans if span[0]]


def _common_prefix(one: list[str], other: list[str]) -> int:
    """The length of the common prefix of two lists of words."""
    same = 0
    for word, other_word in zip(one, other):
        if word != other_word:
            break
        same += 1
    return same
