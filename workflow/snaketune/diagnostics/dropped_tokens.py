"""Tokens of a corpus that no training sees, by what `pack` counted."""

from typing import Any

from snaketune.stages.gpu_needs import Finding

# Of the tokens that were read.
WORTH_TELLING = 0.01
FEW_SUPERVISED = 0.02


def check_dropped_tokens(key: str, pack: dict[str, Any]) -> list[Finding]:
    """What rows of this length lose, and what isn't learned from.

    Args:
        key: of the run, such as `sft.demo`.
        pack: manifest of its rows.

    >>> lost = {"rows": 30, "tokens": 40_000, "enough": 2048}
    >>> counts = {"read": 100, "read_tokens": 120_000, "tokens": 80_000, "supervised_tokens": 30_000, "kept": 70}
    >>> manifest = {"packing_metadata": {"lost_to_length": lost}, "counts": {"train": counts}, "row_length": 512}
    >>> print(*check_dropped_tokens("sft.demo", manifest))  # doctest: +NORMALIZE_WHITESPACE
    sft.demo.packing.length: 33.3% of the tokens (40,000 of 120,000, in 30 of 100 sequences) are lost, since rows have 512
        tokens; rows of 2048 would keep 99% of them
    """
    counts, metadata = pack["counts"]["train"], pack.get("packing_metadata", {})
    lost, read = (
        metadata.get("lost_to_length") or {"rows": 0, "tokens": 0, "enough": None},
        counts.get("read_tokens", 0),
    )
    found = []
    if read and lost["tokens"] > WORTH_TELLING * read:
        enough = f"rows of {lost['enough']} would keep 99% of them" if lost.get("enough") else "make rows longer"
        found.append(
            Finding(
                key=f"{key}.packing.length",
                problem=f"{lost['tokens'] / read:.1%} of the tokens ({lost['tokens']:,} of {read:,}, in {lost['rows']:,} of "
                f"{counts['read']:,} sequences) are lost, since rows have {pack['row_length']} tokens",
                do=enough,
                certain=False,
            )
        )
    tokens, supervised = counts.get("tokens", 0), counts.get("supervised_tokens", 0)
    if tokens and not supervised:
        found.append(
            Finding(
                key=f"{key}.packing.train_on",
                problem="no token of the rows is supervised, so that nothing would be learned",
                do="look at the tokenizer's chat template, and at which turns are marked `supervised: false`",
            )
        )
    elif tokens and supervised < FEW_SUPERVISED * tokens:
        found.append(
            Finding(
                key=f"{key}.packing.train_on",
                problem=f"only {supervised / tokens:.2%} of the tokens are supervised ({supervised:,} of {tokens:,})",
                do="if the prompts are meant to be so long, leave it; else look at the tokenizer's chat template",
                certain=False,
            )
        )
    return found
