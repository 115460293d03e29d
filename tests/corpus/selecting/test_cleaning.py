"""Cleaning: each step changes what it should, is counted, and does nothing unless configured."""

import json
import subprocess
import sys

import pytest

from snaketune import patterns
from snaketune.config.corpora import Cleaning
from snaketune.corpus.rows import Conversation, Dropped, Malformed, Preference
from snaketune.corpus.selecting.cleaning import Cleaner
from snaketune.errors import SnaketuneError

ENGLISH = "The weather is lovely today, and we went for a long walk along the river."
GERMAN = "Das Wetter ist heute sehr schön, und wir sind lange am Fluss entlang gegangen."


def chat(prompt="Hi", reply="Hello", **known):
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
    return Conversation(messages=turns, **known)


def cleaned(text, **steps):
    """What cleaning makes of a text."""
    return Cleaner(Cleaning(**steps)).clean(chat(text)).messages[0]["content"]


def test_the_default_changes_nothing(make, chat):
    assert not Cleaner(Cleaning()).active
    text = "schÃ¶n ﬁne me@example.com e\u0301"
    built = make([chat(text)])
    assert built.prompts() == [text] and built.counts["cleaned"] == {}


def test_mojibake_alone_is_fixed():
    assert cleaned("schÃ¶n, itâ€™s", fix_mojibake=True) == "schön, it’s"
    for sound in (
        "“curled” ﬁne ｗｉｄｅ",
        "a &amp; b &lt;é",
        "line\r\nend é",
        "\x1b[31mred é",
        "e\u0301 and é",
        "☃ \0",
    ):
        assert cleaned(sound, fix_mojibake=True) == sound


def test_normalization():
    assert cleaned("e\u0301 ﬁ", normalization="NFC") == "é ﬁ"
    assert cleaned("e\u0301 ﬁ", normalization="NFKC") == "é fi"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("write to ann.lee+x@mail.example.org!", "write to [EMAIL]!"),
        ("call (555) 123-4567 or +49 30 901820", "call [PHONE] or [PHONE]"),
        ("card 4111 1111 1111 1111.", "card [CREDIT_CARD]."),
        ("at 192.168.10.7:80", "at [IP_ADDRESS]:80"),
        ("SSN 536-22-1234", "SSN [SSN]"),
    ],
)
def test_personal_data(text, masked):
    kinds = ("email", "phone", "credit_card", "ip_address", "ssn")
    assert cleaned(text, mask_personal_data=kinds) == masked
    only_email = cleaned(text, mask_personal_data=("email",))
    assert only_email == (masked if "EMAIL" in masked else text)


def test_numbers_that_are_not_personal_stay():
    kinds = ("email", "phone", "credit_card", "ip_address", "ssn")
    for text in (
        "a population of 123456789 in 2020",
        "at 1700000000 seconds",
        "12 + 30 = 42; 3.14159",
        "x @ y",
        "1,000,000,000",
    ):
        assert cleaned(text, mask_personal_data=kinds) == text


def test_personal_data_needs_no_network_and_no_thread(tmp_path):
    script = """
import sys, threading
seen = []
sys.addaudithook(lambda event, _: seen.append(event) if event.startswith(("socket.", "urllib.")) else None)
threading.Thread.start = lambda self: seen.append("thread")
from snaketune import patterns
from snaketune.config.corpora import Cleaning
from snaketune.corpus.selecting.cleaning import Cleaner
from snaketune.corpus.rows import Conversation
cleaner = Cleaner(Cleaning(mask_personal_data=("email", "phone")))
turns = [{"role": "user", "content": "a@example.com"}, {"role": "assistant", "content": "(555) 123-4567"}]
cleaner.clean(Conversation(messages=turns))
assert cleaner.counts["email"] == cleaner.counts["phone"] == 1
assert not seen, seen
assert not {"spacy", "torch"} & set(sys.modules)
"""
    # datafog would send telemetry if it were enabled; it must be off whatever the environment says.
    environment = {"DATAFOG_TELEMETRY": "1", "HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


def test_counts_are_of_rows_changed_and_of_data_masked(make, chat):
    built = make(
        [chat("schÃ¶n a@b.org c@d.org", "grÃ¼n"), chat("plain", "fine"), chat("e@f.org", "(555) 123-4567")],
        cleaning={"fix_mojibake": True, "normalization": "NFC", "mask_personal_data": ["email", "phone"]},
    )
    assert built.counts["cleaned"] == {"fix_mojibake": 1, "mask_personal_data": 2, "email": 3, "phone": 1}
    assert built.prompts() == ["schön [EMAIL] [EMAIL]", "plain", "[EMAIL]"]


def test_tools_are_masked_and_stay_json(make, chat):
    tool = {
        "name": "send",
        "description": "Writes to a@b.org",
        "parameters": {"properties": {"n": {"default": 5551234567}}},
    }
    built = make([chat(tools=[tool])], cleaning={"mask_personal_data": ["email", "phone"]})
    assert built.counts["cleaned"] == {"mask_personal_data": 1, "email": 1}
    (function,) = [tool["function"] for tool in json.loads(built.train[0]["tools"])]
    assert function == tool | {"description": "Writes to [EMAIL]"}


def test_the_answer_is_cleaned_like_its_text():
    cleaner = Cleaner(Cleaning(normalization="NFKC"))
    row = chat("q", "ﬁve", answer="ﬁve", task="ﬁ")
    made = cleaner.clean(row)
    assert (made.messages[1]["content"], made.answer, made.task) == ("five", "five", "ﬁ")
    assert row.messages[1]["content"] == "ﬁve"


@pytest.mark.parametrize(
    ("cleaning", "reason"),
    [
        ({"min_characters": 1000}, "too_short"),
        ({"max_characters": 100}, "too_long"),
        ({"drop_matching": ["(?i)cannot", r"lovely\s+today"]}, "matches_pattern"),
        ({"languages": ["de", "fr"]}, "language"),
    ],
)
def test_rows_are_dropped_by_reason(make, chat, cleaning, reason):
    other = {"min_characters": "x" * 1000, "max_characters": "Kurz.", "drop_matching": "Kurz."}.get(
        next(iter(cleaning)), GERMAN
    )
    built = make([chat(ENGLISH, ENGLISH), chat(other, other)], cleaning=cleaning)
    assert built.counts["dropped"] == {"duplicate": 0, reason: 1}
    assert built.prompts() == [other]


def test_the_length_of_a_row_is_that_of_all_turns():
    cleaner = Cleaner(Cleaning(min_characters=7, max_characters=7))
    assert cleaner.clean(chat("Hi", "Hello"))
    for row, reason in ((chat("Hi", "Hell"), "too_short"), (chat("Hi!", "Hello"), "too_long")):
        with pytest.raises(Dropped) as dropped:
            cleaner.clean(row)
        assert dropped.value.reason == reason


def test_lengths_are_those_after_masking():
    steps = {"mask_personal_data": ("email",), "max_characters": 20}
    assert cleaned("somebody.with.a.long.name@example.org", **steps) == "[EMAIL]"


def test_an_unknown_language():
    with pytest.raises(SnaketuneError, match=r"can't detect xx, zzz; it knows .*\ben\b"):
        Cleaner(Cleaning(languages=("zzz", "en", "xx")))


def test_a_turn_without_text_after_cleaning():
    cleaner = Cleaner(Cleaning(normalization="NFC"))
    cleaner.steps = {"normalization": lambda text: text.replace("x", " ")}
    with pytest.raises(Malformed) as error:
        cleaner.clean(chat("xx"))
    assert error.value.reason == "empty_turn" and "turn 1 (user)" in error.value.detail


def test_completions_that_cleaning_makes_the_same(make):
    rows = [{"prompt": "q", "chosen": "ﬁne", "rejected": "fine"}, {"prompt": "q", "chosen": "ﬁne", "rejected": "bad"}]
    built = make(rows, kind="preferences", cleaning={"normalization": "NFKC"}, max_quarantined_fraction=0.5)
    assert [bad["reason"] for bad in built.quarantine] == ["identical_chosen_and_rejected"]
    assert [row["chosen"][0]["content"] for row in built.train] == ["fine"]


def test_each_part_of_a_preference_is_cleaned():
    def say(role, text):
        return {"role": role, "content": text}

    row = Preference(
        prompt=[say("system", "ﬀ"), say("user", "ﬁ")],
        chosen=[say("assistant", "ﬂ")],
        rejected=[say("assistant", "ﬃ"), say("user", "u"), say("assistant", "ﬄ")],
    )
    made = Cleaner(Cleaning(normalization="NFKC")).clean(row)
    assert [turn["content"] for turn in made.prompt] == ["ff", "fi"]
    assert [turn["content"] for turn in made.chosen] == ["fl"]
    assert [turn["content"] for turn in made.rejected] == ["ffi", "u", "ffl"]
    assert [turn["role"] for turn in made.turns] == [turn["role"] for turn in row.turns]


def test_rows_made_the_same_are_duplicates(make, chat):
    built = make([chat("ﬁ"), chat("fi")], cleaning={"normalization": "NFKC"})
    assert built.counts["dropped"] == {"duplicate": 1}


def test_a_slow_pattern_fails_the_stage_with_pattern_and_location(make, monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 0.2)
    endless = "a" * 60 + "!"
    rows = [{"prompt": "fine", "response": "yes"}, {"prompt": endless, "response": endless}]
    for settings in ({"cleaning": {"drop_matching": ["(a|aa)+$"]}}, {"answer_pattern": "^(?:a|aa)+()$"}):
        with pytest.raises(SnaketuneError, match=r"data/0.jsonl, line 2: the pattern .* takes more than"):
            make(rows, **settings)
