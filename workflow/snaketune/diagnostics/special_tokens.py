"""Checks of padding and end-of-turn tokens. That templates supervise the right tokens is checked by the `tokenizer` stage."""

from typing import Any

from snaketune.stages.findings import Finding
from snaketune.tokenization.chat import ChatTokenizer


def check_pad_token(key: str, chat: ChatTokenizer, tokenizer: dict[str, Any]) -> list[Finding]:
    """Return a finding if one token both pads and ends turns.

    Masking padding by its id would hide the end of turn from the loss, and the model would never stop.

    Args:
        key: the run's key.
        tokenizer: manifest of the tokenizer.
    """
    if chat.pad_id in chat.stop_ids:
        return [
            Finding(
                key=f"{key}.tokenizer",
                problem=f"{chat.id_to_token(chat.pad_id)!r} both pads and ends a turn: code that masks padding by its id hides "
                "the end of turn from the loss, and the model never stops",
                do="set a pad_token of its own in its tokenizer_config.json",
                certain=False,
            )
        ]
    if before := tokenizer.get("adopted", {}).get("own_pad_token"):
        return [
            Finding(
                key=f"{key}.tokenizer",
                problem=f"the adopted tokenizer pads with {before!r}, which ends its turns: models trained with it elsewhere "
                f"never learn to stop. Here {chat.id_to_token(chat.pad_id)!r} pads",
                do="serve the model with the tokenizer beside it, not with the adopted one",
                certain=False,
            )
        ]
    return []
