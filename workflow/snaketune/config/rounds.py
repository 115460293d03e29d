"""Expands trainings in rounds to the entries that a person would write by hand.

    dpo.self: {from: tuned, rounds: 2, ...}        sft.self: {use_base: sft:few, corpus: few, rounds: 2, ...}

    sample.self-1   of sft:tuned                   sample.self-1   of sft:few
    score.self-1                                   score.self-1
    corpora.self-1  pairs of score.self-1          corpora.self-1  rows of few, and of score.self-1
    dpo.self-1      from tuned                     sft.self-1      from few
    sample.self-2   of dpo:self-1                  sample.self-2   of sft:self-1
    score.self-2                                   score.self-2
    corpora.self-2  pairs of score.self-2          corpora.self-2  rows of few, and of score.self-1 and score.self-2
    dpo.self-2      from dpo:self-1                sft.self-2      from sft:self-1

All corpora of a run hold out the same prompts, or one of them would train on what another holds out.
"""

from typing import Any

from snaketune.config.base import Reference
from snaketune.config.corpora import Corpus
from snaketune.config.corpus_sources import Source
from snaketune.config.nested import changed
from snaketune.config.sampling import Sample
from snaketune.config.scoring import Score
from snaketune.config.training_runs import Dpo, Sft
from snaketune.config.workflow import Variants, Workflow
from snaketune.errors import SnaketuneError
from snaketune.suggestions import unknown

Entries = dict[str, dict[str, Any]]
# What a round can't change: where the rounds begin, and what all of them are made from.
FIXED = {"base", "use_base", "from", "tokenizer", "rounds", "reference", "corpus", "mix"}
# Keys of corpora that may differ between those that a round joins.
OF_SOURCES = {"kind", "sources", "license", "description", "parts"}


def expand_rounds(config: Workflow, variants: Variants) -> tuple[Workflow, Variants]:
    """The config with an entry for each step of each round, and the names that a run's name then stands for.

    Raises:
        SnaketuneError: a name is taken, a corpus is unknown, or corpora of a run hold out different prompts.
    """
    entries: Entries = {section: dict(getattr(config, section)) for section in ("corpora", "sample", "score")}
    variants = {section: dict(names) for section, names in variants.items()}
    for section in ("sft", "dpo"):
        runs: dict[str, Any] = {}
        for name, run in getattr(config, section).items():
            rounds = _Rounds(config, section, name, run).expand(entries) if run.rounds else {name: run}
            if taken := next((of_round for of_round in rounds if of_round in runs), None):
                raise _taken(section, name, f"{section}.{taken}")
            runs |= rounds
            for configured, names in variants[section].items() if run.rounds else ():
                variants[section][configured] = tuple(
                    of_round for named in names for of_round in (rounds if named == name else (named,))
                )
        entries[section] = runs
    return config.model_copy(update=entries), variants


class _Rounds:
    """A training in rounds, as the config states it."""

    def __init__(self, config: Workflow, section: str, name: str, run: Sft | Dpo):
        self.config, self.section, self.name, self.run = config, section, name, run
        self.key = f"{section}.{name}"
        assert run.rounds and run.sample, "the config was checked: a run with rounds has a sample"
        self.first_prompts = run.sample.prompts
        unchanged: dict[str, Any] = {}
        changes = run.rounds if isinstance(run.rounds, tuple) else (unchanged,) * run.rounds
        self.runs = [self._changed(number, change) for number, change in enumerate(changes)]

    def _changed(self, number: int, change: dict[str, Any]) -> Any:
        """The run with the keys that a round changes. Args: number: from 0."""
        key = f"{self.key}.rounds.{number}"
        if fixed := sorted(FIXED & {str(dotted).partition(".")[0] for dotted in change}):
            raise SnaketuneError(f"{key}.{fixed[0]}: is one for all rounds, so a single round can't change it")
        return changed(key, self.run, change)

    def expand(self, entries: Entries) -> dict[str, Any]:
        """The runs of the rounds by name. Args: entries: by section, to which what the rounds are made from is added."""
        self._check_split()
        names = [f"{self.name}-{number}" for number in range(1, len(self.runs) + 1)]
        # What the first round samples.
        model, taken = self.run.start or f"base:{names[0]}", 0
        runs: dict[str, Any] = {}
        for number, (name, run) in enumerate(zip(names, self.runs)):
            prompts = run.sample.prompts
            # Before the first round, no score is known.
            known = {"scored": names[:number]} if number else {"solved": 1.0, "unsolved": 1.0}
            prompts = type(prompts)(**(dict(prompts) | {"skip": taken} | (known if prompts.leaves_out else {})))
            taken += prompts.limit or 0
            made = {
                "sample": Sample(**(dict(run.sample) | {"model": model, "prompts": prompts})),
                "score": Score(samples=name, by=run.score.by),
                "corpora": self._corpus(names[: number + 1]),
            }
            for section, entry in made.items():
                if name in entries[section]:
                    raise _taken(self.section, self.name, f"{section}.{name}")
                entries[section][name] = entry
            runs[name] = self._round(run, name, model if number else None)
            model = f"{self.section}:{name}"
        return runs

    def _round(self, run: Any, name: str, before: str | None) -> Sft | Dpo:
        """The training of a round. Args: before: the model of the round before; None for the first one."""
        changes: dict[str, Any] = {
            "rounds": None,
            "sample": None,
            "score": None,
            "corpus": Reference.to("corpora", name),
        }
        if isinstance(run, Sft):
            changes |= {"rows": None} | ({"base": None, "use_base": Reference.to("", before)} if before else {})
            return run.model_copy(update=changes)
        changes |= {"pairs": None, "mix": {}} | ({"from_": Reference.to("", before)} if before else {})
        if run.reference in ("start", "previous"):
            starts = run.reference == "start" and before
            changes["reference"] = Reference.to("", run.start) if starts else None
        return run.model_copy(update=changes)

    def _corpus(self, names: list[str]) -> Corpus:
        """The corpus of the last of these rounds."""
        if isinstance(self.run, Sft):
            labelled = self.config.corpora[self.run.corpus]
            rows = [
                Source(scores=name, rows=run.rows.rule, at_least=run.rows.at_least, min_rows=run.rows.min_rows)
                for name, run in zip(names, self.runs)
            ]
            description = f"Rows of {self.run.corpus}, and responses of the model itself, from {len(names)} rounds."
            return labelled.model_copy(update={"sources": (*labelled.sources, *rows), "description": description})
        pairs = self.runs[len(names) - 1].pairs
        made = Source(
            scores=names[-1],
            pairs=pairs.rule,
            margin=pairs.margin,
            per_prompt=pairs.per_prompt,
            min_rows=pairs.min_rows,
        )
        mixed = [
            source.model_copy(update={"weight": source.weight * weight})
            for corpus, weight in self.run.mix.items()
            for source in self.config.corpora[corpus].sources
        ]
        joined = [self.config.corpora[corpus] for corpus in self.run.mix]
        alike = joined[0] if joined else self.config.corpora[self.first_prompts.corpora[0]]
        settings = alike.model_dump(exclude=OF_SOURCES) if joined else {}
        settings |= {"held_out": alike.held_out, "split_seed": alike.split_seed}
        description = "Pairs of responses of the model itself" + "".join(f", and of {name}" for name in self.run.mix)
        return Corpus(kind="preferences", sources=(made, *mixed), description=f"{description}.", **settings)

    def _check_split(self) -> None:
        """Raise SnaketuneError if the corpora of the rounds don't exist, or don't hold out the same prompts."""
        run, corpora = self.run, self.config.corpora
        named = {name: f"{self.key}.sample.prompts.corpora" for one in self.runs for name in one.sample.prompts.corpora}
        named |= {run.corpus: f"{self.key}.corpus"} if isinstance(run, Sft) else {}
        mixed = dict.fromkeys(run.mix, f"{self.key}.mix") if isinstance(run, Dpo) else {}
        for name, key in (named | mixed).items():
            if name not in corpora:
                raise SnaketuneError(f"{key}: there is no {name!r} under `corpora:`{unknown(name, corpora)}")
            if name in mixed and corpora[name].kind != "preferences":
                raise SnaketuneError(
                    f"{key}: {name} has {corpora[name].kind}; pairs are joined with corpora of preferences"
                )
        (first, *others), checked = list(named | mixed), ("held_out", "split_seed")
        for name in others:
            for setting in checked:
                here, there = getattr(corpora[first], setting), getattr(corpora[name], setting)
                if here != there:
                    raise SnaketuneError(
                        f"corpora.{name}.{setting}: found {there}, but {first} has {here}, and the rounds of {self.key} train "
                        "on prompts of both: what one holds out, the other would train on; give both the same"
                    )
        for name in list(mixed)[1:]:
            first = corpora[next(iter(mixed))].model_dump(exclude=OF_SOURCES)
            other = corpora[name].model_dump(exclude=OF_SOURCES)
            if different := next((key for key, value in first.items() if value != other[key]), None):
                raise SnaketuneError(
                    f"{self.key}.mix: {name} and {next(iter(mixed))} have another {different}, and both are joined to one "
                    "corpus; give both the same"
                )


def _taken(section: str, name: str, entry: str) -> SnaketuneError:
    return SnaketuneError(
        f"{section}.{name}.rounds: a round would be called {entry}, and there is an entry of this name; rename one of them"
    )
