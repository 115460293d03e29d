"""Errors for unrecognised rows name the nearest layout and its missing columns."""

import pytest

from snaketune.corpus.rows import Malformed
from tests.corpus.row_spelling import CONVERSATIONS, PREFERENCES, read, turns


@pytest.mark.parametrize(
    "columns, kind, says",
    [
        ("prompt chosen", PREFERENCES, "nearest: pairs (prompt, chosen, rejected); `rejected` is missing;"),
        (
            "conversations rejected",
            PREFERENCES,
            "nearest: pairs (conversations, chosen, rejected); `chosen` is missing;",
        ),
        ("Prompt Chosen Rejected", PREFERENCES, "`Prompt` would have to be called `prompt`, `Chosen` would have"),
        (
            "question response_a response_b",
            PREFERENCES,
            "nearest: votes (question, response_a, response_b, preference);",
        ),
        (
            "question answer_0 answer_1 score_0",
            PREFERENCES,
            "votes (question, answer_0, answer_1, preference); `preference`",
        ),
        ("prompt completion", PREFERENCES, "nearest: unpaired (prompt, completion, label); `label` is missing;"),
        ("instruction label", "unpaired", "unpaired (instruction, completion, label); `completion` is missing"),
        ("rejected", "unpaired", "the row has rejected; expected prompt, completion, label"),
        ("prompt", CONVERSATIONS, "nearest: prompt-response (prompt, response); `response` is missing;"),
        ("Question Response", CONVERSATIONS, "(question, response); `Question` would have to be called `question`, "),
        ("question completions", CONVERSATIONS, "`completions` would have to be called `completion`; or map columns"),
        ("message_ids x", CONVERSATIONS, "nearest: message-tree"),
        ("Messages", CONVERSATIONS, "nearest: messages (messages); `Messages` would have to be called `messages`;"),
        ("text id", CONVERSATIONS, "map columns with `fields`, or read documents by a corpus of kind text"),
        ("content", CONVERSATIONS, "the row has content; map columns with `fields`"),
        ("", CONVERSATIONS, "no column that isn't null; map columns with `fields`"),
    ],
)
def test_nearest(columns, kind, says):
    with pytest.raises(Malformed) as error:
        read(dict.fromkeys(columns.split(), "x"), kind, layout="auto")
    assert error.value.reason in ("unknown_layout", "wrong_kind")
    assert says in error.value.detail


def test_null_columns_are_missing():
    with pytest.raises(Malformed, match=r"the row has prompt, chosen; nearest: pairs .*`rejected` is missing"):
        read({"prompt": "q", "chosen": "x", "rejected": None}, PREFERENCES)


def test_pairs_without_a_prompt():
    with pytest.raises(Malformed, match=r"missing_column: no column holds the prompt .*conversations"):
        read({"chosen": "x", "rejected": "y"}, PREFERENCES)
    with pytest.raises(Malformed, match=r"missing_column: no column rejected.* the row has prompt, chosen"):
        read({"prompt": "q", "chosen": "x"}, PREFERENCES, layout="pairs")


def test_conversations_for_a_corpus_of_preferences():
    with pytest.raises(
        Malformed,
        match=r"wrong_kind: rows of layout sharegpt are for kind conversations, and the corpus is of kind pref",
    ):
        read({"conversations": turns("U q", "A r")}, PREFERENCES)
