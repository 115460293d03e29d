"""Words of texts, and n-grams of words."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from snaketune.corpus.selecting.words import TextHashes, split_words, windows, words_of


@settings(deadline=None)
@given(st.lists(st.text("ab .", max_size=20), max_size=5), st.integers(1, 4))
def test_windows_are_all_ngrams(texts, n):
    runs = windows(words_of(texts), n)
    expected = []
    for text in texts:
        words = split_words(text)
        of_text = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)] or [tuple(words)] * bool(words)
        expected += of_text
        assert runs.lengths[texts.index(text)] == len(of_text)
    numbers = dict(zip(expected, runs.hashes.tolist()))
    assert [numbers[run] for run in expected] == runs.hashes.tolist()
    assert len(set(numbers.values())) == len(numbers)


def test_a_batch_without_texts_has_no_windows():
    assert windows(words_of([]), 3).lengths.tolist() == []
    assert windows(TextHashes(np.empty(0, np.uint64), np.array([0, 0])), 3).lengths.tolist() == [0]


def test_accents_count_as_one_character_however_they_are_written():
    composed, decomposed = "Ein schöner Tag", "Ein scho\u0308ner Tag"
    assert split_words(composed) == split_words(decomposed)
    assert words_of([composed]).hashes.tolist() == words_of([decomposed]).hashes.tolist()
