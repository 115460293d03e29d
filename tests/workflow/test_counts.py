"""Every row and token of a run is counted once, from reading to packing."""

import json
from pathlib import Path


def manifests(folder: Path) -> list[dict]:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/manifest.json"))]
    assert found
    return found


def test_rows_of_a_corpus_are_kept_or_have_a_reason(finished):
    for manifest in manifests(finished.folder / "results/corpus"):
        counts = manifest["counts"]
        quarantined = dict(counts["quarantined"])
        total = quarantined.pop("total")
        incoming = sum(counts.get(name, 0) for name in ("read", "extra", "repeated"))
        kept, dropped = sum(counts["kept"].values()), sum(counts["dropped"].values())
        assert incoming == kept + dropped + total + counts.get("joined", 0)
        assert total == sum(quarantined.values())
        for name, whole in (("read", counts["read"]), ("kept", kept)):
            assert whole == sum(source[name] for source in counts["sources"])


def test_tokens_of_a_pack_are_packed_or_have_a_reason(finished):
    for manifest in manifests(finished.folder / "results/pack"):
        for split in ("train", "held_out"):
            counts = manifest["counts"][split]
            assert counts["read"] == counts["kept"] + sum(counts["dropped"].values())
            shared = counts["shared_prompt_tokens"] + counts["shared_answer_tokens"]
            removed = sum(counts["dropped_tokens"].values()) + counts["truncated"]["tokens"] + shared
            assert counts["read_tokens"] + counts["mismatched_tokens"] == counts["tokens"] + removed
