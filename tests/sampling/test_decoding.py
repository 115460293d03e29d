"""Sampling, penalties and stop texts: by their definitions, and the same in any batch."""

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from snaketune.sampling.decoding import Draw, PenalizeRepeated, left_padded
from snaketune.sampling.responses import batches, cut
from tests.models.conftest import tiny_model

from .generated import Chat, engine_of, several

PROMPTS = [np.arange(4, 4 + n, dtype=np.int32) for n in (3, 9, 5, 1, 2)]


def written(prompts: list[np.ndarray] = PROMPTS, batch_size: int = 99, stops: tuple[int, ...] = (1,), **decoding):
    rows = several(tiny_model("llama"), prompts, batch_size=batch_size, chat=Chat(*stops), **decoding)
    # Log-probabilities differ by rounding.
    return [response._replace(logp=None, tokens=tuple(response.tokens)) for (response,) in rows]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "seed": 3},
        {"temperature": 0.7, "repetition_penalty": 1.5},
        {"repetition_penalty": 1.5},
        {"temperature": 1.0, "stop": ["1", "42 "]},
    ],
)
def test_a_response_is_the_same_in_any_batch_and_any_order(settings):
    together = written(**settings)
    assert len(set(together)) > 1
    assert together == written(batch_size=2, **settings) == written(batch_size=1, **settings)
    assert together[::-1] == written(PROMPTS[::-1], batch_size=3, **settings)
    assert together != written(**({"max_new_tokens": 12} if settings.get("temperature") else {"temperature": 1.0}))


def test_other_seeds_differ_and_longer_responses_extend_shorter_ones():
    assert written(temperature=1.0) != written(temperature=1.0, seed=1)
    short, long = written(temperature=1.0, max_new_tokens=4), written(temperature=1.0)
    assert all(more.text.startswith(less.text) for less, more in zip(short, long, strict=True))


def test_a_low_temperature_or_one_token_to_choose_from_is_greedy():
    assert (
        written(temperature=1e-4)
        == written(temperature=1.0, top_k=1)
        == written(temperature=5.0, top_p=1e-6)
        == written()
    )


def test_tokens_are_sampled_by_their_probabilities():
    logits_V = torch.tensor([0.0, 1.0, -torch.inf, 2.0, -1.0])
    numbers_BN = torch.rand(20_000, 1, generator=torch.Generator().manual_seed(0))
    drawn = Draw(numbers_BN, 2)(torch.zeros(20_000, 2), logits_V.expand(20_000, -1))
    assert (drawn > -torch.inf).sum(1).eq(1).all()
    shares_V = drawn.argmax(1).bincount(minlength=5) / 20_000
    assert torch.allclose(shares_V, logits_V.softmax(0), atol=0.012)
    # Tokens with probability 0 are never sampled, at neither end.
    ends = Draw(torch.tensor([[0.0], [1.0]]), 2)(
        torch.zeros(2, 2), torch.tensor([-torch.inf, 1.0, 1.0, -torch.inf]).expand(2, -1)
    )
    assert ends.argmax(1).tolist() == [1, 2]


def test_the_penalty_equals_that_of_transformers_without_padding():
    ids_BW, mask_BW = left_padded(PROMPTS, pad_id=0)
    ids_BL = torch.cat([ids_BW, torch.tensor([[50], [51], [50], [52], [50]])], 1)
    scores_BV = torch.randn(5, 97, generator=torch.Generator().manual_seed(0))
    found_BV = PenalizeRepeated(1.5, ids_BW, mask_BW)(ids_BL, scores_BV)
    for row, prompt in enumerate(PROMPTS):
        alone_1L = torch.cat([torch.from_numpy(prompt.astype(np.int64)), ids_BL[row, -1:]])[None]
        expected_1V = RepetitionPenaltyLogitsProcessor(1.5)(alone_1L, scores_BV[row : row + 1].clone())
        assert torch.equal(found_BV[row], expected_1V[0])


def test_a_response_ends_before_the_first_stop_text_and_counts_its_tokens():
    plain = [response.text.split() for response in written(stops=(2,))]
    stop = f" {plain[0][4]} "
    stopped = written(stops=(2,), stop=[stop, "no such text"])
    for words, response in zip(plain, stopped, strict=True):
        whole = " ".join(words)
        position = whole.find(stop)
        assert response.text == (whole if position < 0 else whole[:position])
        # The stop text ends with a space, which only the next token adds.
        assert len(response.tokens) == (12 if position < 0 else len((whole[: position + len(stop)] + "x").split()))
    assert stopped[0].text and len(stopped[0].tokens) < 12
    assert {response.ended for response in stopped} == {"stop", "length"}


def test_a_batch_ends_when_all_of_its_rows_have_stopped():
    model, widths = tiny_model("llama"), []
    forward = model.forward

    def counting(*args, **kwargs):
        widths.append(1)
        return forward(*args, **kwargs)

    model.forward = counting
    first = [response.text.split()[1] for response in written(stops=(2,))]
    rows = several(model, PROMPTS, chat=Chat(2), max_new_tokens=40, stop=tuple(first))
    assert max(len(response.tokens) for (response,) in rows) == len(widths) <= 3


def test_responses_arrive_batch_by_batch():
    """What is killed loses one batch at most."""
    arriving = engine_of(tiny_model("llama"), max_new_tokens=12).generate(batches(PROMPTS, 1, 2))
    # The shortest prompts are first.
    assert [len(next(arriving)) for _ in range(3)] == [2, 2, 1]


def test_a_stop_text_ends_with_the_fewest_tokens_that_contain_it():
    def decode(ids):
        return "".join("abc\n"[id] for id in ids)

    assert cut([0, 1, 3, 3, 2], decode, ["\n\n", "zz"]) == ("ab", 4, True)
    assert cut([0, 1], decode, ["\n"]) == ("ab", 2, False)
    assert cut([3, 0], decode, ["\n"]) == ("", 1, True)
    assert cut([], decode, ["\n"]) == ("", 0, False)
