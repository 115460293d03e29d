"""The split: by prompt, the same in every corpus, of the configured share."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snaketune.corpus.selecting.splits import is_held_out, prompt_hash, split_key


def user(text):
    return {"role": "user", "content": text}


def held_out(key, *, seed, share):
    """Whether one prompt is held out."""
    return bool(is_held_out(np.array([prompt_hash(key, seed)], np.uint64), share)[0])


def test_the_share_is_met():
    keys = [f"prompt {i}" for i in range(20_000)]
    for share in (0.01, 0.05, 0.5):
        held = sum(held_out(key, seed=3, share=share) for key in keys)
        assert held / len(keys) == pytest.approx(share, rel=0.15)


@settings(deadline=None)
@given(st.text(), st.integers())
def test_shares_0_and_1(key, seed):
    assert not held_out(key, seed=seed, share=0.0)
    assert held_out(key, seed=seed, share=1.0)


@settings(deadline=None)
@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_includes_a_smaller_one(key, a, b):
    if held_out(key, seed=0, share=min(a, b)):
        assert held_out(key, seed=0, share=max(a, b))


def test_the_seed_changes_the_split():
    keys = [str(i) for i in range(1000)]
    by_seed = [{key for key in keys if held_out(key, seed=seed, share=0.5)} for seed in (0, 1)]
    assert 150 < len(by_seed[0] & by_seed[1]) < 350


def test_key_is_system_and_first_user_turn():
    system = {"role": "system", "content": "Be brief."}
    replies = [{"role": "assistant", "content": "x"}, user("more")]
    assert split_key([user("Hi")]) == split_key([user("Hi"), *replies])
    assert split_key([system, user("Hi")]) == split_key([system, user("Hi"), *replies]) != split_key([user("Hi")])
    assert split_key([{"role": "system", "content": "a"}, user("bc")]) != split_key(
        [{"role": "system", "content": "ab"}, user("c")]
    )


def test_which_prompts_are_held_out_never_changes():
    # Frozen: a change here would move evaluation rows of existing corpora into training.
    assert [i for i in range(100) if held_out(str(i), seed=0, share=0.1)] == [8, 14, 49, 57, 60]
