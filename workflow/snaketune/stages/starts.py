"""What the trainings of a config start from and are measured against: where its weights lie, and its reference."""

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any

from snaketune.config.diagnose import doubtful, variants_of
from snaketune.config.operation import Execution
from snaketune.config.runs import Dpo, Lora, Pretrained, Scratch, Sft
from snaketune.config.workflow import Workflow
from snaketune.stages.jobs import Job, short_digest
from snaketune.stages.specs import RefLogpsSpec, RefPassSpec, canonical
from snaketune.stages.weights import Weights


def kept(make: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is asked for the same again and again, by hashable arguments, as a corpus is by each part of each run."""

    @wraps(make)
    def made(self: "Starts", *of: Any) -> Any:
        key = (make.__name__, *of)
        if key not in self._kept:
            self._kept[key] = make(self, *of)
        return self._kept[key]

    return made


class Starts:
    """That part of `stages.asked`; what it asks for besides is found there."""

    config: Workflow
    _kept: dict[tuple, Any]

    def _add(self, job: Job) -> Job:
        raise TypeError("a subclass defines this")

    def _tokenizer(self, name: str) -> Job:
        raise TypeError("a subclass defines this")

    def _sft(self, name: str) -> Job:
        raise TypeError("a subclass defines this")

    def _dpo(self, name: str) -> Job:
        raise TypeError("a subclass defines this")

    def _preference_pack(self, run: Dpo) -> Job:
        raise TypeError("a subclass defines this")

    def _start_of(self, run: Sft) -> Weights:
        return self._weights("sft", run.continues) if run.continues else Weights(base=run.base)

    @kept
    def _weights(self, kind: str, name: str) -> Weights:
        """Those of a run's model; of the kind `base`, of what it starts from."""
        if kind == "base":
            return self._start_of(self.config.sft[name])
        if kind == "sft":
            run, job, lora = self.config.sft[name], self._sft(name), self.config.sft[name].lora
        else:
            run, job = self.config.dpo[name], self._dpo(name)
            lora = self._lora_of(run)
        if lora is None or lora.merge:
            return Weights(results=(job,))
        if isinstance(run, Sft):
            beneath = self._start_of(run)
        elif run.lora == "continued":
            # In the place of the SFT run's adapter, and not upon it.
            beneath = self._start_of(self.config.sft[run.from_])
        else:
            beneath = self._weights("sft", run.from_)
        return Weights(results=(job, *beneath.results), base=beneath.base)

    def _shape(self, name: str) -> Pretrained | Scratch:
        """The base of an SFT run, or of the one that it goes on from."""
        run = self.config.sft[name]
        return self._shape(run.continues) if run.continues else run.base

    def _trusted(self, name: str) -> bool:
        """Whether an SFT run's models carry code that the config allows to run."""
        run = self.config.sft[name]
        if run.continues:
            return self._trusted(run.continues)
        return isinstance(run.base, Pretrained) and run.base.trust_remote_code

    def _references(self, run: Dpo) -> tuple[Job, ...]:
        """The reference log-probabilities that a run learns against; none if its loss has no reference."""
        return (self._ref_logps(self._shared_by(run)),) if run.needs_reference else ()

    def _start_of_dpo(self, run: Dpo) -> Weights:
        """The SFT run's model; with its adapter apart from what lies beneath, where that is trained further."""
        if run.lora != "continued":
            return self._weights("sft", run.from_)
        beneath = self._start_of(self.config.sft[run.from_])
        return Weights(results=(self._sft(run.from_), *beneath.results), base=beneath.base)

    def _lora_of(self, run: Dpo) -> Lora | None:
        if run.lora != "continued":
            return run.lora
        # The adapter is in the reference too, which drops nothing out.
        return self.config.sft[run.from_].lora.model_copy(update={"dropout": 0.0})

    def _ref_spec(self, run: Dpo) -> RefLogpsSpec:
        if run.reference:
            # As it is, whatever the runs do with their own model: so all of them share it.
            told = {"frozen_weights": True, "quantization": None, "base": run.reference, "apart": False}
            trusted = run.reference.trust_remote_code
        else:
            told = {"frozen_weights": run.lora is not None, "quantization": run.quantization}
            told |= {"base": self._start_of_dpo(run).base, "apart": run.lora == "continued"}
            trusted = self._trusted(run.from_)
        told["token_logps"] = run.reference_pass.token_logps or run.ld_alpha is not None
        return RefLogpsSpec(precision=run.training.precision, trust_remote_code=trusted, **told)

    @cached_property
    def _sharing(self) -> dict[tuple[str, str, str], list[Dpo]]:
        """By model, pack and spec, the runs that share a reference."""
        found: dict[tuple[str, str, str], list[Dpo]] = {}
        tried = (
            run
            for name, one in self.config.diagnose.items()
            if one.run.startswith("dpo:")
            for run in one.variants(name, self.config.dpo[one.run.removeprefix("dpo:")]).values()
        )
        doubted = (
            other for run in self.config.dpo.values() for other in variants_of("doctor", doubtful(run), run).values()
        )
        for run in (run for run in (*self.config.dpo.values(), *tried, *doubted) if run.needs_reference):
            found.setdefault(self._shared_by(run), []).append(run)
        return found

    def _shared_by(self, run: Dpo, **other: bool) -> tuple[str, str, str]:
        """Args: other: what else its spec says."""
        spec = self._ref_spec(run).model_copy(update=other)
        return run.from_, self._preference_pack(run).name, canonical(spec)

    @kept
    def _ref_logps(self, shared_by: tuple[str, str, str]) -> Job:
        """The reference's log-probabilities, as all runs need them that share them.

        Those with the values of single tokens are a result of their own, so that a run that asks for them later leaves what
        others were trained on as it is; where both are yet to be made, they come first, and the others are taken from them.
        """
        runs = self._sharing[shared_by]
        run = runs[0]
        pack, spec = self._preference_pack(run), self._ref_spec(run)
        detailed = self._shared_by(run, token_logps=True)
        first = (self._ref_logps(detailed),) if not spec.token_logps and detailed in self._sharing else ()
        name = f"{run.from_}-{pack.name}-{short_digest(spec, run.from_, pack.name)}"
        model = Weights(base=run.reference) if run.reference else self._start_of_dpo(run)
        tokenizer = (self._tokenizer(self.config.sft[run.from_].tokenizer),) if run.reference else ()
        operation = Execution(
            gpus=max(min(one.operation.gpus, 1) for one in runs),
            allow_cpu=any(one.operation.allow_cpu for one in runs),
            # One that doesn't would refuse what it gets.
            share_kernels=all(one.reference_pass.share_kernels for one in runs),
        )
        made_from = {
            "artifacts": model.artifacts | {"pack": (pack,), "tokenizer": tokenizer},
            "files": {"base": model.files},
        }
        count = max(one.reference_pass.parts for one in runs)
        parts = tuple(
            self._add(
                Job(
                    stage="ref_pass",
                    name=f"{name}/{part}-of-{count}",
                    spec=RefPassSpec(**dict(spec), part=part, parts=count),
                    operation=operation,
                    after=first,
                    **made_from,
                )
            )
            for part in range(1, count + 1)
            if count > 1
        )
        if parts:
            pattern = parts[0].manifest.replace(f"/1-of-{count}/", f"/*-of-{count}/")
            operation = operation.model_copy(update={"parts": pattern})
        after = (*first, *parts)
        return self._add(Job(stage="ref_logps", name=name, spec=spec, operation=operation, after=after, **made_from))
