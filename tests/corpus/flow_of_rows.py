"""Where every row went, by the counts of a manifest."""

from typing import Any


def balances(counts: dict[str, Any]) -> bool:
    """Whether every row is accounted for, in all and per source."""
    quarantined = counts["quarantined"]["total"]
    kept = sum(counts["kept"].values())
    sources = counts["sources"]
    return (
        flows(counts | {"quarantined": quarantined, "kept": kept})
        and all(flows(source) for source in sources)
        and quarantined == sum(n for reason, n in counts["quarantined"].items() if reason != "total")
        and quarantined == sum(source["quarantined"] for source in sources)
        and kept == sum(source["kept"] for source in sources)
        and kept == sum(counts["characters"]["rows"])
        and all(
            counts[name] == sum(source[name] for source in sources) for name in ("read", "extra", "joined", "repeated")
        )
        and all(sum(source["layouts"].values()) == source["kept"] for source in sources)
    )


def flows(counts: dict[str, Any]) -> bool:
    """Whether what came in is what went out."""
    found = counts["read"] + counts["extra"] + counts["repeated"]
    return found == counts["joined"] + counts["quarantined"] + sum(counts["dropped"].values()) + counts["kept"]
