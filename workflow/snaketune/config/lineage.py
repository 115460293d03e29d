"""What the entries of a config are made from: corpora may hold responses of models, which are trained on corpora.

wave 0    corpora.chat ── sft.start
wave 1    sample.tries (of sft.start) ── score.checked ── corpora.own ── dpo.own
"""

from snaketune.config.workflow import Workflow


def made_from(config: Workflow, node: str) -> list[str]:
    """The entries that an entry is directly made from, as `section.name`; none for an entry that doesn't exist."""
    section, _, name = node.partition(".")
    if name not in getattr(config, section):
        return []
    entry = getattr(config, section)[name]
    match section:
        case "corpora":
            return [f"score.{score}" for score in entry.sampled]
        case "tokenizers":
            return [f"corpora.{corpus}" for corpus in (entry.train.corpora if entry.train else ())]
        case "score":
            judge = (entry.by.judge and entry.by.judge.model) or (entry.by.reward and entry.by.reward.model)
            above = [f"sample.{entry.samples}", *(f"score.{summand}" for summand in entry.by.sum or ())]
            return [*above, *(_model(config, judge) if judge else ())]
        case "sample":
            prompts = entry.prompts
            above = [*_model(config, entry.model), *(f"corpora.{corpus}" for corpus in prompts.corpora)]
            return [*above, *(f"score.{score}" for score in prompts.scored)]
        case "merge":
            return [model.replace(":", ".", 1) for model in entry.models]
        case "sft":
            return [f"corpora.{entry.corpus}", *_model(config, f"base:{name}")]
    reference = getattr(entry, "reference", None)
    models = [entry.start, *([reference] if isinstance(reference, str) else [])]
    return [f"corpora.{entry.corpus}", *(model.replace(":", ".", 1) for model in models)]


def _model(config: Workflow, model: str) -> list[str]:
    """What a model is: its run, or for the initial weights of an SFT run, what that starts from, and its tokenizer."""
    kind, _, name = model.partition(":")
    if kind != "base":
        return [f"{kind}.{name}"]
    if name not in config.sft:
        return []
    run = config.sft[name]
    return [f"tokenizers.{run.tokenizer}", *([f"sft.{run.continues}"] if run.continues else [])]


def cycle_of(config: Workflow, node: str) -> list[str]:
    """The entries of a circle that begins and ends with this one; empty if it isn't made from itself."""
    known: set[str] = set()

    def find(path: list[str]) -> list[str]:
        for above in made_from(config, path[-1]):
            if above == node:
                return [*path, above]
            if above not in known:
                known.add(above)
                if found := find([*path, above]):
                    return found
        return []

    return find([node])


def wave_of(config: Workflow, node: str, known: dict[str, int] | None = None) -> int:
    """How often models are sampled, one after the other, before an entry is made. Args: known: waves of other entries."""
    known = {} if known is None else known
    if node not in known:
        above = [wave_of(config, entry, known) for entry in made_from(config, node)]
        known[node] = max(above, default=0) + node.startswith("sample.")
    return known[node]
