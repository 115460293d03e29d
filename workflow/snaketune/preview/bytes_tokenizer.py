"""A byte tokenizer for previews without a tokenizer: one token per byte, and the control tokens of a chat template.

With it, rows pass through the same code as with a real tokenizer: the chat template, its refusals, and the supervision of each
byte.
"""

import re
from typing import Any

from tokenizers import pre_tokenizers

from snaketune.tokenization.creation.train import TURN_END

# Control tokens in chat templates: <|im_end|>, <start_of_turn>, [INST], <s>, <｜User｜>.
CONTROL = re.compile(r"<[|｜][^<>\s]{1,40}[|｜]>|</?s>|<[a-z]+(?:_[a-z]+)*_turn>|\[/?[A-Z][A-Z_]*\]|<[be]os>")
BEGIN, END, PAD = "<s>", "</s>", "<pad>"


def bytes_tokenizer(template: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return parsed `tokenizer.json` and `tokenizer_config.json` of a byte tokenizer for a chat template."""
    added_tokens = dict.fromkeys([BEGIN, END, PAD, *CONTROL.findall(template)])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    flags = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    description = {
        "version": "1.0",
        "added_tokens": [
            {"id": len(alphabet) + number, "content": token, **flags} for number, token in enumerate(added_tokens)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": {byte: id for id, byte in enumerate(alphabet)}, "merges": []},
    }
    end = TURN_END if TURN_END in added_tokens else END
    return description, {"bos_token": BEGIN, "eos_token": end, "pad_token": PAD}
