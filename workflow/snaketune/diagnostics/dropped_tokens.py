"""Checks for tokens of a corpus that no training sees, from the counts of `pack`."""

from typing import Any

from snaketune.stages.findings import Finding

# Findings are reported above this share of dropped tokens, and below this share of supervised ones.
REPORTED_SHARE = 0.01
FEW_SUPERVISED = 0.02


def check_dropped_tokens(key: str, pack: dict[str, Any]) -> list[Finding]:
    """Return findings on tokens dropped for rows of this length, and on rows with few supervised tokens.

    Args:
        key: the run's key, such as `sft.demo`.
        pack: manifest of its rows.

    >>> dropped = {"rows": 30, "tokens": 40_000, "enough": 2048}
    >>> counts = {"read": 100, "read_tokens": 120_000, "tokens": 80_000, "supervised_tokens": 30_000, "kept": 70}
    >>> manifest = {"packing_metadata": {"lost_to_length": dropped}, "counts": {"train": counts}, "row_length": 512}
    >>> print(*check_dropped_tokens("sft.demo", manifest))  # doctest: +NORMALIZE_WHITESPACE
    sft.demo.packing.length: 33.3% of the tokens (40,000 of 120,000, in 30 of 100 sequences) are dropped, since rows have 512
        tokens; rows of 2048 would keep 99% of them
    """
    counts, metadata = pack["counts"]["train"], pack.get("packing_metadata", {})
    dropped, read = (
        metadata.get("lost_to_length") or {"rows": 0, "tokens": 0, "enough": None},
        counts.get("read_tokens", 0),
    )
    findings = []
    if read and dropped["tokens"] > REPORTED_SHARE * read:
        enough = f"rows of {dropped['enough']} would keep 99% of them" if dropped.get("enough") else "make rows longer"
        findings.append(
            Finding(
                key=f"{key}.packing.length",
                problem=f"{dropped['tokens'] / read:.1%} of the tokens ({dropped['tokens']:,} of {read:,}, in "
                f"{dropped['rows']:,} of {counts['read']:,} sequences) are dropped, since rows have "
                f"{pack['row_length']} tokens",
                do=enough,
                certain=False,
            )
        )
    tokens, supervised = counts.get("tokens", 0), counts.get("supervised_tokens", 0)
    if tokens and not supervised:
        findings.append(
            Finding(
                key=f"{key}.packing.train_on",
                problem="no token of the rows is supervised, so nothing would be learned",
                do="check the tokenizer's chat template, and which turns are marked `supervised: false`",
            )
        )
    elif tokens and supervised < FEW_SUPERVISED * tokens:
        findings.append(
            Finding(
                key=f"{key}.packing.train_on",
                problem=f"only {supervised / tokens:.2%} of the tokens are supervised ({supervised:,} of {tokens:,})",
                do="if the prompts are meant to be that long, ignore this; otherwise check the tokenizer's chat template",
                certain=False,
            )
        )
    return findings
