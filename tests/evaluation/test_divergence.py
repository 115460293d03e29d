"""The KL divergence of responses from another model."""

import numpy as np
import pytest
import torch

from snaketune.engine.model.devices import resolve_compute
from snaketune.evaluation.divergence import kl_of_responses, summarize_kl
from tests.models.conftest import tiny_model

PROMPTS = [np.array([5, 6, 7]), np.array([8]), np.array([9, 10])]
RESPONSES = [[11, 12], [13, 14, 15, 2], []]


def test_it_is_the_divergence_of_the_distributions_of_each_token_of_the_response():
    torch.manual_seed(0)
    model, other = tiny_model("llama"), tiny_model("qwen2")
    found = kl_of_responses(model, other, PROMPTS, RESPONSES, resolve_compute("float32"))
    for (nats, tokens), prompt, response in zip(found, PROMPTS, RESPONSES, strict=True):
        expected = 0.0
        # Token by token, without those after it.
        for known in range(len(response)):
            ids = torch.tensor([[*prompt.tolist(), *response[:known]]])
            logps = [policy(input_ids=ids).logits[0, -1].double().log_softmax(-1) for policy in (other, model)]
            expected += float(torch.nn.functional.kl_div(*logps, reduction="sum", log_target=True))
        assert (tokens, nats) == (len(response), pytest.approx(expected, rel=1e-4))
    assert found[0][0] > 1e-4


def test_a_model_is_at_no_distance_from_itself_and_lengths_weigh():
    model = tiny_model("llama")
    found = kl_of_responses(model, model, PROMPTS, RESPONSES, resolve_compute("float32"))
    assert [nats for nats, _ in found] == [0.0, 0.0, 0.0]
    summary = summarize_kl([(2.0, 1), (0.0, 3)] * 3)
    assert (summary["per_token"], summary["per_response"]) == (0.5, 1.0)
    assert summary["per_token_interval"][0] < 0.5 < summary["per_token_interval"][1]
    assert summarize_kl([(0.0, 0)])["per_token"] is None
