"""A token that pads and ends turns. Whether a template has the right words learned, the `tokenizer` stage has found out."""

from snaketune.stages.needs import Finding
from snaketune.tokenization.chat import ChatTokenizer


def pads_with_the_end(key: str, chat: ChatTokenizer) -> list[Finding]:
    """Of tokenizers whose padding isn't eos, but what their template ends turns with.

    Args:
        key: of the run.
    """
    if chat.pad_id not in chat.stop_ids:
        return []
    return [
        Finding(
            key=f"{key}.tokenizer",
            found=f"{chat.text_of(chat.pad_id)!r} both pads and ends a turn: whoever masks padding by its id hides the end of "
            "turn from the loss, and the model never stops",
            do="give its tokenizer_config.json a pad_token of its own",
            certain=False,
        )
    ]
