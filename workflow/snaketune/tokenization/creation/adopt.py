"""Adoption of a base model's tokenizer, with its own chat template or another.

AutoTokenizer loads it, which is the only import of torch (about 2 s) in the data stages.
"""

from pathlib import Path

from snaketune.errors import SnaketuneError
from snaketune.stages.specs import TokenizerSpec
from snaketune.tokenization.creation.train import PAD
from snaketune.tokenization.template import shipped_templates


def adopt(spec: TokenizerSpec, template: str | None, folder: Path) -> dict[str, str | None]:
    """Write the tokenizer of `spec.adopt`, with `template` or its own, to `folder`.

    Returns:
        The source of the chat template, the pad token, and the base's own pad token if it was replaced.
    Raises:
        SnaketuneError: it can't be loaded, or has no fast version or no eos token.
    """
    from transformers import AutoTokenizer

    name = f"tokenizers.adopt: {spec.adopt}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            spec.adopt, revision=spec.revision or "main", trust_remote_code=False, use_fast=True
        )
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise SnaketuneError(
            f"{name} can't be loaded as a tokenizer: {reason}; give a folder with tokenizer.json, or a Hub id and revision"
        ) from None
    if not tokenizer.is_fast:
        raise SnaketuneError(
            f"{name} has only a slow tokenizer ({type(tokenizer).__name__}); masks need the character offsets of a fast "
            "one: convert it to tokenizer.json, or adopt another"
        )
    if tokenizer.eos_token is None:
        raise SnaketuneError(f"{name} has no eos token, so nothing can end a turn; adopt another tokenizer")

    own = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    if template is None and own is None:
        # Documents need none; conversations are refused by the `tokenize` stage.
        print(
            f"{name} has no chat template, so only corpora of kind text can be tokenized. For conversations and pairs, name "
            f"one under `chat_template`: {shipped_templates()}",
            flush=True,
        )
    tokenizer.chat_template = template or own

    own_pad = tokenizer.pad_token
    if tokenizer.pad_token is None or tokenizer.pad_token == tokenizer.eos_token:
        # If eos also pads, masking padding by its id would exclude the end of turn from the loss.
        if tokenizer.unk_token is not None and tokenizer.unk_token != tokenizer.eos_token:
            tokenizer.pad_token = tokenizer.unk_token
        else:
            tokenizer.add_special_tokens({"pad_token": PAD})
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(folder)
    source = "given" if template else "the model's own" if own else "none"
    own = {"own_pad_token": own_pad} if own_pad and own_pad != tokenizer.pad_token else {}
    return {"chat_template": source, "pad_token": tokenizer.pad_token, **own}
