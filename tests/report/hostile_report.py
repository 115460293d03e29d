"""A report of results with markup in every text that users, files, models and evaluations control."""

import json
from pathlib import Path

from invented_data import bad, hit
from invented_results import Results

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)></style>{{ 7 * 7 }} $\\frac{1}{2}$ & \x00\x1b[31m\u202e"


def hostile_report(results: Results, hostile: str = HOSTILE) -> Path:
    """Build the report, and return the folder of its pages."""
    tokenizer = results.tokenizer(samples=[{"tokens": 3, "supervised": 1, "supervised_text": [hostile]}])
    tokenized = {"samples": [[[f"<s>{hostile}", False], [hostile, True]]], "ways": (("reference", hostile),)}
    pack = results.pack("chat-demo-128-aa", hostile_corpus(results, hostile), tokenizer, tokenized=tokenized)
    pairs = results.texts("pairs", {"p": (hostile, hostile, f"not {hostile}"), "q": (hostile, "yes", hostile)})
    preferred = results.pack("pairs-demo-128-bb", pairs, tokenizer, kind="preference")
    model = results.sft("a", pack, tokenizer)
    spec = {"loss": {hostile: 0.5}, "lora": {hostile: hostile}}
    results.dpo("a", model, preferred, spec=spec, logged={hostile: 1.0}, stopped={"step": 1, "reason": hostile})
    results.dpo("b", model, preferred)
    path = results.folder / "results/dpo/a/run.json"
    warning = {"step": 1, "kind": hostile, "text": hostile, "at_end": {"text": f"still {hostile}"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"warnings": [warning]}))
    for name, before in (("sft-a", ""), ("dpo-a", "Well, "), ("dpo-b", "")):
        results.pairs(f"main/{name}", {"p": 0.5, "q": -0.5}, reference={"p": -0.5, "q": 0.5} if "dpo" in name else None)
        results.evaluate(
            f"main/{name}",
            text=before + hostile.replace("{", "{{").replace("}", "}}"),
            task_names=(hostile.replace("\ud800", ""), "plain"),
        )
    _, pages = results.report(
        title=f"<script>{hostile}", note=f"a & b <img>{hostile}", sort_by="preferences.pairs.logp_accuracy"
    )
    return pages


def hostile_corpus(results: Results, hostile: str) -> str:
    """A corpus with markup in every text that users, files and evaluations control."""
    quarantined = bad(hostile, 1) | {"file": hostile, "detail": hostile, "excerpt": hostile}
    layouts = {"layouts": {hostile: 80}, "ignored": {hostile: 7}}
    contaminated = hit(2, hostile, hostile) | {"ngram": hostile, "file": hostile, "id": hostile}
    return results.corpus(
        "chat",
        quarantined={hostile: 1},
        near_duplicates={"groups": 1, "largest": 2},
        contamination={"ngram": 13, "hits": {hostile: 1}},
        records={
            "quarantine.jsonl": [quarantined],
            "duplicates.jsonl": [{"rows": 2, "ids": [hostile], "excerpt": hostile}],
            "contamination.jsonl": [contaminated],
        },
        repeated=1,
        sources=[
            {"files": [hostile], "read": 80, "quarantined": 1, "dropped": {hostile: 1}, "kept": 80}
            | dict.fromkeys(("extra", "repeated", "joined"), 0)
            | layouts
        ],
    )
