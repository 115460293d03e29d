"""The shipped Mistral templates write what mistral-common 1.13.1 encodes (`encode_chat_completion(...).text`)."""

import pytest
from small_tokenizers import MISTRAL, TEMPLATES, messages

from snaketune.tokenization.template import render

TEKKEN = TEMPLATES / "mistral-tekken.jinja"
# By its tokenizers: v2, v3 and v7 of sentencepiece (whose ▁ is a space), v3 of tekken. Its v1 has no [INST] token.
TEXTS = {
    MISTRAL: "<s>[INST] Which day?[/INST] Monday.</s>[INST] And then?[/INST]",
    TEKKEN: "<s>[INST]Which day?[/INST]Monday.</s>[INST]And then?[/INST]",
}


@pytest.mark.parametrize("template", TEXTS, ids=lambda path: path.stem)
def test_prompts_are_those_of_mistral_common(template):
    prompt = messages("Which day?", "Monday.", "And then?")
    (text,), _ = render(template.read_text(), [prompt], {"bos_token": "<s>", "eos_token": "</s>"}, True)
    assert text == TEXTS[template]
