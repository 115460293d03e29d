"""Rows with an image, audio or video beside the text are refused; rows with empty media columns are read."""

import pytest

from snaketune.corpus.rows import Malformed
from tests.corpus.row_spelling import CONVERSATIONS, PREFERENCES, compact, read, sharegpt, turns

CHAT = {"messages": turns("U q", "A r")}


@pytest.mark.parametrize(
    ("raw", "kind", "says"),
    [
        (CHAT | {"images": ["x.png"]}, CONVERSATIONS, "images belongs to the text"),
        (CHAT | {"image": {"bytes": b"x", "path": None}}, CONVERSATIONS, "image belongs"),
        ({"conversations": sharegpt("U q", "A r"), "image": "x.jpg"}, CONVERSATIONS, "image belongs"),
        ({"prompt": "q", "response": "r", "audio_path": "x.wav"}, CONVERSATIONS, "audio_path belongs"),
        ({"question": "q", "image": "x", "chosen": "x", "rejected": "y"}, PREFERENCES, "image belongs"),
        (
            {"messages": [{"role": "user", "content": "q", "images": ["x"]}, *turns("A r")]},
            CONVERSATIONS,
            "turn 1: images",
        ),
        ({"messages": turns("U <image>\nWhat is it?", "A r")}, CONVERSATIONS, "turn 1 has a placeholder of an image"),
        ({"question": "<image 1> q", "answer": "r"}, CONVERSATIONS, "turn 1 has a placeholder"),
        ({"question": "<video>\nq", "answer": "r"}, CONVERSATIONS, "turn 1 has a placeholder"),
        ({"question": "q", "answer": "r", "image_1": {"bytes": "x"}}, CONVERSATIONS, "image_1 belongs"),
        (
            {"messages": [{"role": "user", "content": [{"text": "q", "image": {"bytes": "x"}}]}, *turns("A r")]},
            CONVERSATIONS,
            "image belongs",
        ),
        ({"prompt": "<image>q", "chosen": "x", "rejected": "y"}, PREFERENCES, "turn 1 has a placeholder of an image"),
    ],
)
def test_refused(raw, kind, says):
    with pytest.raises(Malformed, match=f"^unsupported_part: .*{says}"):
        read(raw, kind)


@pytest.mark.parametrize(
    "raw",
    [
        CHAT | {"images": []},
        CHAT | {"images": [{"bytes": None, "path": None}]},
        CHAT | {"image": "nan"},
        CHAT | {"video_url": "https://example.org/a"},
        {"messages": turns("U What does <video> do in HTML?", "A r")},
        CHAT | {"image": None, "videos": None},
        {"messages": turns("U q", "A Put <image> there.")},
        {"messages": turns("U What does <image>x.png</image> mean?", "A r")},
    ],
)
def test_read(raw):
    assert compact(read(raw)[1].messages).startswith("U ")


def test_fields_read_the_columns_that_they_name_and_no_others():
    raw = {"prompt": "q", "response": "r", "image": "x.png"}
    assert compact(read(raw, prompt="prompt", response="response")[1].messages) == "U q|A r"
