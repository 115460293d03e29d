"""Tokens that pad and end turns. Whether a template has the right words learned, the `tokenizer` stage has found out."""

from typing import Any

from snaketune.stages.gpu_needs import Finding
from snaketune.tokenization.chat import ChatTokenizer


def check_pad_token(key: str, chat: ChatTokenizer, tokenizer: dict[str, Any]) -> list[Finding]:
    """Whoever masks padding by its id hides the end of turn from the loss, and the model never stops.

    Args:
        key: of the run.
        tokenizer: manifest.
    """
    if chat.pad_id in chat.stop_ids:
        return [
            Finding(
                key=f"{key}.tokenizer",
                problem=f"{chat.text_of(chat.pad_id)!r} both pads and ends a turn: whoever masks padding by its id hides the end "
                "of turn from the loss, and the model never stops",
                do="give its tokenizer_config.json a pad_token of its own",
                certain=False,
            )
        ]
    if before := tokenizer.get("adopted", {}).get("own_pad_token"):
        return [
            Finding(
                key=f"{key}.tokenizer",
                problem=f"the adopted tokenizer pads with {before!r}, which ends its turns: trained elsewhere, models with it "
                f"never learn to stop. Here {chat.text_of(chat.pad_id)!r} pads",
                do="serve the model with the tokenizer beside it, not with the adopted one",
                certain=False,
            )
        ]
    return []
