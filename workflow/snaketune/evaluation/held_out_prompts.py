"""The held-out prompts of an evaluation, in the order of its responses."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from snaketune.artifacts.manifest import Artifact
from snaketune.artifacts.split_files import read_split
from snaketune.evaluation.exact_match import Prompt, choose_prompts
from snaketune.stages.specs import EvalSpec
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.template import Refused


def held_out_prompts(
    spec: EvalSpec, chat: ChatTokenizer, corpora: Sequence[Artifact]
) -> tuple[list[Prompt], list[np.ndarray]]:
    """The held-out prompts that the chat template accepts, and their tokens."""
    prompts: list[Prompt] = []
    for name, corpus in zip(spec.conversations, corpora, strict=True):
        held_out = read_split(corpus, "held_out")
        prompts += choose_prompts(name, held_out, spec.exact_match.limit, max(spec.samples, spec.judged))
    return _encode_prompts(chat, prompts, spec.generation.template_variables)


def _encode_prompts(
    chat: ChatTokenizer, prompts: list[Prompt], variables: dict[str, Any]
) -> tuple[list[Prompt], list[np.ndarray]]:
    """Return the prompts that the chat template accepts, and their tokens; `variables` replace those of the rows.

    Raises:
        SnaketuneError: the template doesn't use one of `variables`.
    """
    chat.with_variables(json.dumps(variables))
    accepted, encoded = [], []
    for prompt in prompts:
        of_row = json.loads(prompt.template_variables or "{}") | variables
        try:
            encoded.append(chat.encode_prompt(prompt.messages, prompt.tools, json.dumps(of_row) if of_row else None))
            accepted.append(prompt)
        except Refused as reason:
            print(f"skipped: prompt {prompt.id} of {prompt.corpus}: {reason}", flush=True)
    return accepted, encoded
