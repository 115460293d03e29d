"""Near duplicates: which rows are grouped, which one stays, and that groups are on one side of the split."""

import random

import numpy as np
import pytest

from snaketune.corpus.selecting.duplicates import Groups
from snaketune.corpus.selecting.near_duplicates import Signatures, TextWriter
from snaketune.corpus.selecting.words import split_words, words_of

VOCABULARY = [f"{a}{b}{c}" for a in "bdfgklmn" for b in "aeiou" for c in "lmnrst"]


def text(rng, words=60):
    return " ".join(rng.choices(VOCABULARY, k=words))


def changed(rng, original, changes):
    """`original` with as many words changed, away from each other."""
    words = original.split()
    for i in range(changes):
        words[i * len(words) // changes] = rng.choice("123456789") * 3
    return " ".join(words)


def jaccard(a, b, n):
    shingles = [{tuple(words[i : i + n]) for i in range(len(words) - n + 1)} for words in map(split_words, (a, b))]
    return len(shingles[0] & shingles[1]) / len(shingles[0] | shingles[1])


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95])
def test_similar_texts_are_grouped(tmp_path, threshold):
    rng = random.Random(0)
    texts = []
    for i in range(600):
        texts.append(text(rng, 120))
        texts.append(changed(rng, texts[-1], i % 30 + 1))
    # In two parts.
    for part in (0, 1):
        with TextWriter(tmp_path / str(part), threshold=threshold, shingle=3) as writer:
            for start in range(part * 512, len(texts) if part else 512, 256):
                writer.append(words_of(texts[start : start + 256]))
    groups = Groups(np.arange(len(texts)))
    Signatures([tmp_path / "0", tmp_path / "1"], threshold).join_similar(groups, np.ones(len(texts), bool), "texts")
    first = groups.first()
    similar = [jaccard(texts[i], texts[i + 1], 3) for i in range(0, len(texts), 2)]
    found = [first[i] == first[i + 1] for i in range(0, len(texts), 2)]
    clearly = [hit for hit, similarity in zip(found, similar) if similarity > threshold + 0.1]
    clearly_not = [hit for hit, similarity in zip(found, similar) if similarity < threshold - 0.15]
    assert threshold == 0.95 or (len(clearly) > 30 and sum(clearly) / len(clearly) > 0.97)
    assert not any(clearly_not) and len(clearly_not) > 30
    # Nothing else is alike.
    assert all(row in (first[row], first[row] + 1) for row in range(len(texts)))


def test_rows_that_differ_in_symbols_alone_are_different(make, chat):
    """As in dyck_languages of BIG-Bench Hard."""
    rng = random.Random(5)
    question = "Complete the rest of the sequence, making sure that the parentheses are closed properly. Input:"
    rows = [chat(f"{question} {' '.join(rng.choices('<>[](){}', k=30))}", rng.choice(">])}")) for _ in range(100)]
    assert make(rows, near_duplicates={}).counts["dropped"] == {"duplicate": 0}


def test_texts_without_words_are_like_no_other(tmp_path):
    with TextWriter(tmp_path / "s", threshold=0.5, shingle=3) as writer:
        writer.append(words_of(["?!", "...", "yes", "Yes!", ""]))
    groups = Groups(np.arange(5))
    Signatures([tmp_path / "s"], 0.5).join_similar(groups, np.ones(5, bool), "texts")
    assert groups.first().tolist() == [0, 1, 2, 2, 4]


@pytest.fixture
def near_rows(chat):
    rng = random.Random(1)
    originals = [(text(rng), text(rng)) for _ in range(300)]
    rows = [chat(*row) for row in originals]
    rows += [chat(prompt.upper(), changed(rng, reply, 1) + " !!!") for prompt, reply in originals[:100]]
    return rows


def test_the_first_of_each_group_stays(make, near_rows):
    built = make(near_rows, near_duplicates={"threshold": 0.8}, held_out=0.3)
    assert built.counts["dropped"] == {"duplicate": 0, "near_duplicate": 100}
    assert built.counts["near_duplicates"] == {"groups": 100, "largest": 2}
    assert not any(prompt.isupper() for prompt in built.prompts() + built.prompts("held_out"))
    record = built.record("duplicates")
    assert len(record) == 100 and all(group["rows"] == len(group["ids"]) == 2 for group in record)
    ids = [row["id"] for row in built.train + built.held_out]
    assert all(group["ids"][0] in ids and group["ids"][1] not in ids for group in record)
    assert record[0]["excerpt"].startswith('{"messages": [{"role": "user", "content": "')
    assert "duplicates.jsonl" in built.outcome.records


def test_groups_that_are_not_dropped_are_on_one_side(make, near_rows):
    built = make(near_rows, near_duplicates={"threshold": 0.8, "drop": False}, held_out=0.3)
    assert built.counts["dropped"] == {"duplicate": 0}
    train, held = set(built.prompts()), set(built.prompts("held_out"))
    assert not {prompt.lower() for prompt in train} & {prompt.lower() for prompt in held}
    assert 20 < sum(prompt.isupper() for prompt in held) < 45
    # The first row of a group decides, as if it were alone.
    alone = make(near_rows[:300], held_out=0.3)
    assert {prompt for prompt in held if not prompt.isupper()} == set(alone.prompts("held_out"))


def test_similar_prompts_are_on_one_side_though_their_answers_differ(make, chat):
    rng = random.Random(2)
    questions = [text(rng) for _ in range(100)]
    rows = [chat(question, text(rng)) for question in questions]
    rows += [chat(changed(rng, question, 1), text(rng)) for question in questions]
    # Earlier turns aren't the prompt, and don't make all of them similar.
    for row in rows:
        row["messages"].insert(0, {"role": "system", "content": " ".join(VOCABULARY)})
    built = make(rows, near_duplicates={"threshold": 0.75}, held_out=0.5)
    assert built.counts["dropped"] == {"duplicate": 0} and built.counts["near_duplicates"] == {
        "groups": 0,
        "largest": 0,
    }

    def first_answers(split):
        return {row["messages"][1]["content"].split()[1] for row in getattr(built, split)}

    held = {" ".join(row["messages"][1]["content"].split()[1:]) for row in built.held_out}
    train = {" ".join(row["messages"][1]["content"].split()[1:]) for row in built.train}
    assert not held & train and 25 < len(held) < 75


def test_rows_linked_by_a_prompt_and_a_group_are_on_one_side(make, chat):
    """a and b are near duplicates with different prompts; c has b's prompt."""
    rng = random.Random(3)
    rows = []
    for _ in range(60):
        answer = text(rng, 200)
        prompts = text(rng, 6), text(rng, 6)
        rows += [chat(prompts[0], answer), chat(prompts[1], answer), chat(prompts[1], text(rng))]
    built = make(rows, near_duplicates={"threshold": 0.8, "drop": False}, held_out=0.5)
    assert built.counts["near_duplicates"] == {"groups": 60, "largest": 2}
    held = set(built.prompts("held_out"))
    for i in range(0, len(rows), 3):
        a, b = rows[i]["messages"][0]["content"], rows[i + 1]["messages"][0]["content"]
        assert (a in held) == (b in held)
    assert not held & set(built.prompts())


def test_preferences_are_compared_by_all_their_texts(make):
    rng = random.Random(4)
    prompt, chosen, rejected = text(rng), text(rng), text(rng)
    rows = [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected},
        {"prompt": prompt, "chosen": chosen + " end", "rejected": rejected},
        {"prompt": prompt, "chosen": chosen, "rejected": text(rng)},
    ]
    built = make(rows, kind="preferences", near_duplicates={})
    assert built.counts["dropped"]["near_duplicate"] == 1 and built.counts["kept"]["train"] == 2


def test_repeated_runs_give_the_same_groups(make, near_rows):
    first, second = (make(near_rows, near_duplicates={}, held_out=0.2) for _ in range(2))
    for name in ("train-00000.arrow", "held_out-00000.arrow", "duplicates.jsonl"):
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()
    assert first.counts == second.counts
