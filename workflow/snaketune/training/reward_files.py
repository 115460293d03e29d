"""The files of a reward model beside its weights: its tokenizer, with a chat template that ends where a reward is read.

Chat templates write more after an assistant's turn than the model writes, often a line break:

    <|im_start|> assistant \\n Hello <|im_end|> \\n          the reward is that of <|im_end|>

`AutoModelForSequenceClassification` reads the last token, so the template of a reward model leaves out what follows the turn.
"""

import json
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.chat_template import ANSWER, QUESTION
from snaketune.training.save_model import copy_other_files, warn_if_tokenizer_differs

TEMPLATE = "chat_template.jinja"
# Of models that write text.
GENERATION = "generation_config.json"


def add_tokenizer(start: Artifact, folder: Path) -> None:
    """Copy the tokenizer of the SFT result that a reward model started from to the model's folder."""
    copy_other_files(start, folder)
    (folder / GENERATION).unlink(missing_ok=True)
    if rest := text_after_turn(ChatTokenizer.load(folder)):
        path = folder / TEMPLATE
        path.write_text(without_end(path.read_text(encoding="utf-8"), rest), encoding="utf-8")
    warn_if_tokenizer_differs(folder)


def text_after_turn(chat: ChatTokenizer) -> str:
    """What the chat template writes after the last assistant turn."""
    (encoded,) = chat.encode([[QUESTION, ANSWER]])
    end = max((span[1] for span in encoded.spans if span), default=len(encoded.ids))
    return chat.text(encoded.ids[end:])


def without_end(template: str, end: str) -> str:
    """A chat template that writes the same without this text at the end.

    >>> print(without_end("{{ messages[0].content }}!", "!"))
    {% set written %}{{ messages[0].content }}!{% endset %}{{ written.removesuffix("!") }}
    """
    # Jinja leaves out one line break at the end of a template.
    body = template.removesuffix("\n")
    return f"{{% set written %}}{body}{{% endset %}}{{{{ written.removesuffix({json.dumps(end)}) }}}}"
