"""Every trained turn follows the tokens that the model gets as its prompt."""

import numpy as np
import pyarrow as pa
import pytest
from small_tokenizers import CHATML, MISTRAL, PHI3, chat_of, families, messages
from tokenizers import Tokenizer

from snaketune.tokenization.batched import batched_encoder
from snaketune.tokenization.encode_rows import encode_turns
from snaketune.tokenization.encoded_rows import EncodedBatch
from snaketune.tokenization.token_rows import pair_rows
from snaketune.tokenization.turn_columns import Turns, turns_of

# Prompts that end with one line break (ChatML, Phi-3), two, a space, no control token, or none but one (Mistral).
HEADERS = {"two": "<|im_start|>assistant\n\n", "space": "<|im_start|>assistant: ", "plain": "assistant:\n"}
TEMPLATES = {
    name: "{% for m in messages %}{{ '<|im_start|>user\n' + m.content + '\n' if m.role == 'user' else HEADER + m.content + "
    "'<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ HEADER }}{% endif %}".replace("HEADER", repr(header))
    for name, header in HEADERS.items()
} | {path.stem: path.read_text() for path in (CHATML, MISTRAL, PHI3)}
# Byte-level with line breaks that merge, sentencepiece's with and without a space before texts, and unigram.
FAMILIES = ("gpt2", "llama3", "llama2", "gemma", "mistral", "t5")
ANSWERS = ("yes", "\nyes", "\n\n yes", "  yes", "\tyes", "1", "\n<|im_end|> yes", "<think>\nyes")


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return families()


@pytest.fixture(scope="module", params=[(family, name) for family in FAMILIES for name in TEMPLATES], ids="-".join)
def chat(request, tokenizers, tmp_path_factory):
    family, name = request.param
    return chat_of(tmp_path_factory.mktemp("tokenizer") / "t", tokenizers[family], TEMPLATES[name])


def encodings(chat, turns: Turns) -> list[EncodedBatch]:
    """Return what each path makes of the rows."""
    batched, _ = batched_encoder(chat)
    return [encode_turns(chat, turns)] + ([batched.encode(turns)[0]] if batched else [])


def paths(encoded: EncodedBatch, row: int) -> list[tuple[list[int], list[bool]]]:
    """Return ids and supervision from the root of a row to the end of each of its segments; the trunk is the first."""
    own = encoded.rows(np.array([row]))
    columns = own.ids.tolist(), (own.supervised > 0).tolist()
    branches = [] if own.branches is None else own.branches[0].tolist()
    starts = [*(start for start, _, _ in branches), len(columns[0])]
    found = [tuple(column[: starts[0]] for column in columns)]
    for (start, prefix, parent), end in zip(branches, starts[1:]):
        found.append(tuple(before[:prefix] + column[start:end] for before, column in zip(found[parent], columns)))
    return found


def follows(chat, row: list[dict], path: tuple[list[int], list[bool]]) -> bool:
    """Whether in a path the last turn of a conversation follows its prompt, and is supervised from its first visible token."""
    (ids, supervised), prompt = path, chat.encode_prompt(row[:-1]).tolist()
    if ids[: len(prompt)] != prompt or supervised[len(prompt) - 1] or True not in supervised[len(prompt) :]:
        return False
    first = supervised.index(True, len(prompt))
    return not chat.text(ids[len(prompt) : first]).strip()


def test_the_prompt_of_every_trained_turn_has_the_tokens_that_generation_gets(chat):
    rows = [messages("q", answer) for answer in ANSWERS]
    rows += [
        messages("q", one, "and", other) for one, other in (("yes", "\nyes"), ("\nyes", "no"), ("\nyes", "\n\nno"))
    ]
    for encoded in encodings(chat, turns_of(pa.table({"messages": rows}), "assistant", "exact")):
        for number, row in enumerate(rows):
            for end in range(2, len(row) + 1, 2):
                assert any(follows(chat, row[:end], path) for path in paths(encoded, number)), row[:end]


@pytest.fixture(scope="module")
def merging(tokenizers, tmp_path_factory):
    """ChatML, with a token for two line breaks and a pattern that doesn't part them."""
    tokenizer = Tokenizer.from_str(tokenizers["gpt2"].to_str())
    tokenizer.pre_tokenizer = tokenizers["qwen"].pre_tokenizer
    return chat_of(tmp_path_factory.mktemp("merging") / "t", tokenizer, TEMPLATES["chatml"])


@pytest.mark.parametrize("answer", ["yes", "\nyes", "\n\nyes", "\n<|im_end|>yes"])
def test_the_answer_and_the_end_of_turn_are_supervised_and_nothing_else(merging, answer):
    for encoded in encodings(merging, turns_of(pa.table({"messages": [messages("q", answer)]}), "assistant", "exact")):
        supervised = encoded.ids[encoded.supervised]
        assert merging.text(supervised) == f"{answer}<|im_end|>"
        assert np.flatnonzero(encoded.supervised)[0] == len(merging.encode_prompt(messages("q")))


def test_a_turn_apart_from_its_prompt_is_a_branch_where_others_follow(merging):
    """In the prompts of later turns, which are encoded at once, the line breaks merge."""
    table = pa.table({"messages": [messages("q", "\nyes", "and", "no"), messages("q", "yes", "and", "\nno")]})
    found = {how: encode_turns(merging, turns_of(table, "assistant", how)) for how in ("exact", "last", "all")}
    rows = {how: [encoded.rows(np.array([row])) for row in (0, 1)] for how, encoded in found.items()}
    texts = {how: [merging.text(row.ids[row.supervised]) for row in own] for how, own in rows.items()}
    assert texts["last"] == ["no<|im_end|>", "yes<|im_end|>\nno<|im_end|>"]
    assert texts["all"] == ["\nyes<|im_end|>no<|im_end|>", texts["last"][1]]
    assert texts["exact"] == ["no<|im_end|>\nyes<|im_end|>", texts["last"][1]]
    assert [len(branches) for branches in found["exact"].branches] == [1, 0] and found["last"].branches is None
    # A turn that isn't trained is what later turns see.
    natural = merging.encode_text(merging.template.write(messages("q", "\nyes", "and", "no"))).ids
    assert rows["last"][0].ids.tolist() == natural


def test_only_rows_that_merge_leave_the_batch(merging):
    rows = [messages("q", "yes"), messages("q\n", "\nyes"), messages("\n\nq", "yes\n", "and", "no")]
    turns = turns_of(pa.table({"messages": rows}), "assistant", "exact")
    assert batched_encoder(merging)[0].encode(turns)[1].tolist() == [1]


def test_both_completions_of_a_pair_have_one_prompt(merging):
    sides = [[{"role": "assistant", "content": content}] for content in ("\nyes", "no", "\n\nno")]
    table = pa.table({"prompt": [messages("q")] * 2, "chosen": sides[:2], "rejected": sides[1:]})
    for encoded in encodings(merging, turns_of(table, "assistant", None)):
        rows = pair_rows(pa.array(["0", "1"]), encoded, np.zeros(2, bool))
        assert rows.prompt.tolist() == [len(merging.encode_prompt(messages("q")))] * 2
        assert len(set(rows.prompt_hash.tolist())) == 1
