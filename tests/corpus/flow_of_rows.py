"""Checks that the counts of a manifest account for every row."""

from typing import Any


def balances(counts: dict[str, Any]) -> bool:
    """Return True if every row is accounted for, in all and per source."""
    quarantined = counts["quarantined"]["total"]
    written = sum(counts["kept"].values())
    sources = counts["sources"]
    return (
        flows(counts | {"quarantined": quarantined, "kept": written})
        and all(flows(source) for source in sources)
        and quarantined == sum(n for reason, n in counts["quarantined"].items() if reason != "total")
        and quarantined == sum(source["quarantined"] for source in sources)
        and written == sum(source["kept"] for source in sources)
        and written == sum(counts["characters"]["rows"])
        and all(
            counts[name] == sum(source[name] for source in sources) for name in ("read", "extra", "joined", "repeated")
        )
        and all(sum(source["layouts"].values()) == source["kept"] for source in sources)
    )


def flows(counts: dict[str, Any]) -> bool:
    """Return True if as many rows came in as went out."""
    incoming = counts["read"] + counts["extra"] + counts["repeated"]
    return incoming == counts["joined"] + counts["quarantined"] + sum(counts["dropped"].values()) + counts["kept"]
