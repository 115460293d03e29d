"""Checks of the references between the sections of a config."""

from collections.abc import Iterable, Sequence
from typing import get_args

from snaketune.config.base_models import Pretrained, Scratch
from snaketune.config.doctor import BASELINE
from snaketune.config.evaluations import Evaluation
from snaketune.config.held_out import NEEDS_REFERENCE, OF_SFT, RaceMetric
from snaketune.config.lineage import cycle_of
from snaketune.config.optimizers import OPTIMIZERS, SCHEDULES, missing_package
from snaketune.config.packing import Packing
from snaketune.config.reward_runs import Reward, Run
from snaketune.config.sampling import Sample
from snaketune.config.training_runs import Dpo, Sft, Training
from snaketune.config.workflow import Gguf, Merge, Push, Variants, Workflow
from snaketune.errors import SnaketuneError
from snaketune.suggestions import unknown


def check_references(config: Workflow, variants: Variants) -> None:
    """Raise SnaketuneError if a section names something that doesn't exist, is of the wrong kind or doesn't fit. Args: as
    `config.load` returns them."""
    for name, tokenizer in config.tokenizers.items():
        for corpus in tokenizer.train.corpora if tokenizer.train else ():
            _known(f"tokenizers.{name}.train.corpora", corpus, config.corpora, "corpora")
    for name in config.corpora:
        _check_sampled(name, config)
    for name, run in config.sft.items():
        _check_sft(f"sft.{name}", name, run, config)
    for name, run in config.dpo.items():
        _check_start(name, run, config, variants)
    for name, run in config.dpo.items():
        _check_dpo(f"dpo.{name}", run, config)
    for name, run in config.reward.items():
        _check_reward(f"reward.{name}", run, config)
    for section, runs in (("sft", config.sft), ("dpo", config.dpo)):
        for name, run_names in variants[section].items():
            _check_race(f"{section}.{name}.race", [runs[run_name] for run_name in run_names], config)
            if runs[run_names[0]].race and (race_name := f"race-{section}-{name}") in config.eval:
                raise SnaketuneError(
                    f"eval.{race_name}: the race of {section}.{name} evaluates under this name; rename it"
                )
    for name, merge in config.merge.items():
        _check_merge(f"merge.{name}.models", merge, config)
    _check_doctor(config)
    for name, evaluation in config.eval.items():
        _check_evaluation(f"eval.{name}", evaluation, config, variants)
    for name, sample in config.sample.items():
        _check_sample(f"sample.{name}", sample, config, variants)
    for name in config.score:
        _check_score(name, config, variants)


def _check_sampled(name: str, config: Workflow) -> None:
    """Raise SnaketuneError if a corpus of scored responses names unknown scores, or is made from itself."""
    for number, source in enumerate(config.corpora[name].sources):
        if source.scores:
            _known(f"corpora.{name}.sources.{number}.scores", source.scores, config.score, "score")
    if config.corpora[name].sampled and (circle := cycle_of(config, f"corpora.{name}")):
        raise SnaketuneError(
            f"corpora.{name}: its responses are of a model that is trained on it: {' → '.join(circle)}; train on another corpus"
        )


def _check_sft(key: str, name: str, run: Sft, config: Workflow) -> None:
    _check_train_corpus(key, run.corpus, config, "conversations", "text")
    if config.corpora[run.corpus].kind == "text":
        _check_document_packing(key, run.packing)
    if run.packing.strategy == "none" and any(
        source.template_variables or source.fields.template_variables for source in config.corpora[run.corpus].sources
    ):
        raise SnaketuneError(
            f"{key}.packing.strategy: with `none`, TRL's trainer would render corpora.{run.corpus} without its "
            "template_variables; choose best-fit-decreasing"
        )
    _known(f"{key}.tokenizer", run.tokenizer, config.tokenizers, "tokenizers")
    _check_length(key, run.packing, name, config)
    _check_order(key, run, config)
    _check_training(f"{key}.training", run.training)
    _check_selection(f"{key}.training", run, config)
    if isinstance(run.base, Pretrained) and config.tokenizers[run.tokenizer].train:
        raise SnaketuneError(
            f"{key}.tokenizer: {run.tokenizer!r} is trained here, but {run.base.path!r} has another vocabulary; use a "
            "tokenizer that adopts the model's own"
        )


def _check_start(name: str, run: Dpo, config: Workflow, variants: Variants) -> None:
    """Raise SnaketuneError if a run that provides weights or a reference is unknown, or starts from this one."""
    _known_model(f"dpo.{name}.from", run.start, config, variants)
    if isinstance(run.reference, str):
        _known_model(f"dpo.{name}.reference", run.reference, config, variants)
    chain = [f"dpo:{name}"]
    while chain[-1] != f"dpo:{name}" or len(chain) == 1:
        section, _, before = chain[-1].partition(":")
        if section == "sft" or before not in config.dpo:
            return
        if chain.count(chain[-1]) > 1:
            # A circle further down, which is reported for its own runs.
            return
        chain.append(config.dpo[before].start)
    raise SnaketuneError(f"dpo.{name}.from: {' → '.join(chain)} is circular; start one of them from an SFT run")


def _check_dpo(key: str, run: Dpo, config: Workflow) -> None:
    _check_train_corpus(key, run.corpus, config, "unpaired" if run.unpaired else "preferences")
    _check_length(key, run.packing, config.sft_below(run), config)
    _check_order(key, run, config)
    adapter = config.lora_of(config.run_of(run.start))
    if run.lora == "continued" and not adapter:
        raise SnaketuneError(
            f"{key}.lora: `continued` trains the adapter of {run.start} further, but that run has no `lora`; set the keys "
            "of a new adapter, or remove lora"
        )
    if run.lora == "continued" and adapter and adapter.changes_base:
        raise SnaketuneError(
            f"{key}.lora: `continued` can't train the adapter of {run.start} further, since its lora.init_lora_weights "
            f"{adapter.init_lora_weights} changed the base weights; set the keys of a new adapter"
        )
    if isinstance(run.reference, str):
        of_reference = config.tokenizer_of(config.run_of(run.reference))
        if of_reference != (tokenizer := config.tokenizer_of(run)):
            raise SnaketuneError(
                f"{key}.reference: {run.reference} has the tokenizer {of_reference!r}, and this run has {tokenizer!r}; name a "
                "run with the same tokenizer"
            )
    _check_training(f"{key}.training", run.training)
    _check_selection(f"{key}.training", run, config)


def _check_reward(key: str, run: Reward, config: Workflow) -> None:
    _known(f"{key}.from", run.from_, config.sft, "sft")
    _check_train_corpus(key, run.corpus, config, "preferences")
    _check_length(key, run.packing, run.from_, config)
    _check_order(key, run, config)
    if run.margin and not any(source.may_have_ratings for source in config.corpora[run.corpus].sources):
        raise SnaketuneError(
            f"{key}.margin: it is the difference of the ratings of a pair, and no source of corpora.{run.corpus} has ratings; "
            "name a corpus with `layout: rated`, fields.ratings or `scores`, or remove margin"
        )
    _check_training(f"{key}.training", run.training)
    _check_selection(f"{key}.training", run, config)


def sft_of(config: Workflow, kind: str, name: str) -> str:
    """The SFT run that a model is, starts from or, if it is merged, of which its first model is."""
    if kind == "reward":
        return config.reward[name].from_
    if kind == "merge":
        kind, name = next(iter(config.merge[name].models)).split(":")
    return config.sft_below(config.dpo[name]) if kind == "dpo" else name


def _check_merge(key: str, merge: Merge, config: Workflow) -> None:
    for model in merge.models:
        section, name = model.split(":")
        _known(key, name, getattr(config, section), section)
    tokenizers = {config.sft[sft_of(config, *model.split(":"))].tokenizer: model for model in merge.models}
    if len(tokenizers) > 1:
        used = ", ".join(f"{model} has {tokenizer}" for tokenizer, model in tokenizers.items())
        raise SnaketuneError(f"{key}: models with different tokenizers can't be merged: {used}")


def _check_doctor(config: Workflow) -> None:
    for key in config.doctor.runs or ():
        section, name = key.split(":")
        _known("doctor.runs", name, getattr(config, section), section)
    if BASELINE in config.doctor.changes:
        raise SnaketuneError(f"doctor.changes.{BASELINE}: this is the name of the unchanged run; choose another one")
    for section, runs in (("sft", config.sft), ("dpo", config.dpo)) if config.doctor.changes else ():
        for of, unchanged in runs.items():
            for name, run in config.doctor.variants(unchanged).items() if config.doctor.examines(section, of) else ():
                key = f"doctor.changes.{name}"
                _check_length(key, run.packing, of if isinstance(run, Sft) else config.sft_below(run), config)
                _check_training(f"{key}.training", run.training)


def _check_evaluation(key: str, evaluation: Evaluation, config: Workflow, variants: Variants) -> None:
    packing, corpora = evaluation.packing, config.corpora
    for model in evaluation.every_model(variants):
        kind, name = model.split(":")
        section = "sft" if kind == "base" else kind
        _known(f"{key}.models", name, getattr(config, section), section)
        _check_length(key, packing, sft_of(config, kind, name), config)
    if evaluation.kl_from:
        _known_model(f"{key}.kl_from", evaluation.kl_from, config, variants)
        tokenizers = {
            config.sft[sft_of(config, *model.split(":"))].tokenizer: model
            for model in (*evaluation.every_model(variants), evaluation.kl_from)
        }
        if len(tokenizers) > 1:
            used = ", ".join(f"{model} has {tokenizer}" for tokenizer, model in tokenizers.items())
            raise SnaketuneError(f"{key}.kl_from: models with different tokenizers can't be compared: {used}")
    if evaluation.judge:
        judge, models = evaluation.judge, [*evaluation.every_policy(variants)]
        if judge.against not in models:
            raise SnaketuneError(
                f"{key}.judge.against: {judge.against} isn't one of the evaluation's models ({', '.join(models)}); add it to "
                "models, or name one of them"
            )
        if len(models) == 1:
            raise SnaketuneError(
                f"{key}.judge: there is only one model, {judge.against}, so there is nothing to compare"
            )
        if not any(corpora[corpus].kind == "conversations" for corpus in evaluation.conversations if corpus in corpora):
            raise SnaketuneError(f"{key}.judge: documents have no prompts; name a corpus of kind conversations")
        if judge.model:
            _known_model(f"{key}.judge.model", judge.model, config, variants)
    for corpus in evaluation.conversations:
        _check_held_out_corpus(f"{key}.conversations", corpus, config, "conversations", "text")
    read = [corpora[corpus] for corpus in evaluation.conversations]
    if read and "exact_match" in evaluation.model_fields_set and not any(corpus.may_have_answers for corpus in read):
        hint = missing_answers_hint(evaluation.conversations, config)
        raise SnaketuneError(f"{key}.exact_match: {hint}, or remove exact_match")
    if read and all(corpus.kind == "text" for corpus in read):
        _check_document_packing(key, packing)
    for model in evaluation.models:
        if model.startswith("reward:") and not evaluation.preferences:
            raise SnaketuneError(
                f"{key}.models: {model} is a reward model, which is evaluated on pairs alone; name corpora under "
                "`preferences`, or remove it"
            )
    for corpus in evaluation.preferences:
        _check_held_out_corpus(f"{key}.preferences", corpus, config, "preferences")
    if packing.order != "shuffled":
        raise SnaketuneError(f"{key}.packing.order: evaluations measure all rows, in any order; remove it")
    if packing.strategy == "none":
        raise SnaketuneError(f"{key}.packing.strategy: `none` has no packed rows to evaluate on")
    if evaluation.preferences and (packing.strategy == "wrapped" or packing.overflow == "split"):
        raise SnaketuneError(
            f"{key}.packing: pairs are never split; choose another strategy and overflow, or evaluate preferences in a "
            "separate entry of `eval:`"
        )


def _check_sample(key: str, sample: Sample, config: Workflow, variants: Variants) -> None:
    _known_model(f"{key}.model", sample.model, config, variants)
    for score in sample.prompts.scored:
        _known(f"{key}.prompts.scored", score, config.score, "score")
    if circle := cycle_of(config, key):
        raise SnaketuneError(f"{key}: is made from itself: {' → '.join(circle)}; name scores of earlier samples")
    for corpus in sample.prompts.corpora:
        _check_corpus(f"{key}.prompts.corpora", corpus, config, "conversations", "preferences", "unpaired")
        if sample.prompts.split == "held_out":
            _check_held_out_corpus(f"{key}.prompts.corpora", corpus, config, config.corpora[corpus].kind)


def _known_model(key: str, model: str, config: Workflow, variants: Variants) -> None:
    """Raise SnaketuneError if a model's run isn't in the config."""
    kind, name = model.split(":")
    section = "sft" if kind == "base" else kind
    if name not in getattr(config, section):
        raise SnaketuneError(f"{key}: {_no_such_run(section, name, config, variants)}")


def _check_score(name: str, config: Workflow, variants: Variants, above: tuple[str, ...] = ()) -> None:
    key, score = f"score.{name}", config.score[name]
    _known(f"{key}.samples", score.samples, config.sample, "sample")
    if score.by.reward and score.by.reward.model:
        _known_model(f"{key}.by.reward.model", score.by.reward.model, config, variants)
    if score.by.judge and score.by.judge.model:
        _known_model(f"{key}.by.judge.model", score.by.judge.model, config, variants)
    for summand in score.by.sum or ():
        _known(f"{key}.by.sum", summand, config.score, "score")
        if summand in (*above, name):
            raise SnaketuneError(f"{key}.by.sum: {' → '.join((*above, name, summand))} is circular")
        if (other := config.score[summand].samples) != score.samples:
            raise SnaketuneError(
                f"{key}.by.sum: {summand!r} scores the sample {other!r}, and {name!r} scores {score.samples!r}; sum scores of "
                "one sample"
            )
        _check_score(summand, config, variants, (*above, name))
    prompts = config.sample[score.samples].prompts
    if score.by.answer and not any(config.corpora[corpus].may_have_answers for corpus in prompts.corpora):
        raise SnaketuneError(f"{key}.by.answer: {missing_answers_hint(prompts.corpora, config)}")


def check_publish_targets(config: Workflow, variants: Variants) -> None:
    """Raise SnaketuneError if a model of `push:` or `gguf:` doesn't exist, is a grid, or has only an adapter although a GGUF
    file needs weights; or if two models are pushed to the same branch."""
    for section in ("push", "gguf"):
        for name, entry in getattr(config, section).items():
            _check_published_model(f"{section}.{name}.model", entry, config, variants)
    targets: dict[tuple[str, str], str] = {}
    for name, push in config.push.items():
        first = targets.setdefault((push.repository.lower(), push.branch), name)
        if first != name:
            raise SnaketuneError(
                f"push.{name}.repository: push.{first} already pushes to branch {push.branch!r} of {push.repository}; choose "
                "another repository or branch"
            )


def _check_published_model(key: str, entry: Push | Gguf, config: Workflow, variants: Variants) -> None:
    kind, name = entry.model.split(":")
    runs = getattr(config, kind)
    if name not in runs:
        raise SnaketuneError(f"{key}: {_no_such_run(kind, name, config, variants)}")
    if kind == "merge":
        return
    lora = config.lora_of(runs[name])
    if isinstance(entry, Gguf) and lora and not lora.merge:
        raise SnaketuneError(
            f"{key}: {entry.model} is an adapter alone (lora.merge: false), and a GGUF file needs full weights; set "
            "lora.merge: true, or convert the adapter with llama.cpp's convert_lora_to_gguf.py"
        )


def _no_such_run(section: str, name: str, config: Workflow, variants: Variants) -> str:
    run_names = variants.get(section, {}).get(name, ())
    if run_names:
        why = f", which is a grid or rounds; name one of its runs: {', '.join(run_names[:4])}"
    else:
        why = unknown(name, getattr(config, section))
    return f"there is no {name!r} under `{section}:`{why}"


def missing_answers_hint(corpora: tuple[str, ...], config: Workflow) -> str:
    """An error message for corpora without checkable answers for exact match, with what to configure."""
    chats = [corpus for corpus in corpora if config.corpora[corpus].kind != "text"]
    if not chats:
        return f"no row of {' and '.join(corpora)} can have a checkable answer, as documents have no questions: name others"
    return (
        f"no row of {' and '.join(chats)} can have a checkable answer: set fields.answer of corpora.{chats[0]}.sources to the "
        f"column that holds it, or corpora.{chats[0]}.answer_pattern to a pattern that finds it in the last assistant turn"
    )


def _first(name: str, config: Workflow) -> Sft:
    """The first run in the chain of `use_base` that ends in this run; SnaketuneError if one is unknown, or the chain is
    circular or of several tokenizers."""
    run, names = config.sft[name], [name]
    while run.continues:
        key = f"sft.{names[-1]}"
        _known(f"{key}.use_base", run.continues, config.sft, "sft")
        names.append(run.continues)
        if run.continues in names[:-1]:
            raise SnaketuneError(f"{key}.use_base: {' → '.join(names)} is circular")
        before = config.sft[run.continues]
        if before.tokenizer != run.tokenizer:
            raise SnaketuneError(
                f"{key}.tokenizer: found {run.tokenizer!r}, but {run.use_base!r}, from which the run starts, has "
                f"{before.tokenizer!r}; use the same tokenizer"
            )
        run = before
    return run


def _check_order(key: str, run: Run, config: Workflow) -> None:
    if run.packing.order == "column" and not config.corpora[run.corpus].order_column:
        raise SnaketuneError(
            f"{key}.packing.order: column, but corpora.{run.corpus} has no `order_column`; name a column of its rows that "
            "holds a number, such as a difficulty"
        )


def _check_length(key: str, packing: Packing, sft: str, config: Workflow) -> None:
    """Raise SnaketuneError if rows are longer than what the model below the SFT run `sft` supports."""
    base = _first(sft, config).base
    if isinstance(base, Scratch) and packing.longest > base.max_positions:
        raise SnaketuneError(
            f"{key}.packing.length: {packing.longest} tokens, but the model's base.max_positions is {base.max_positions}; "
            "lower packing.length or raise max_positions"
        )
    # Without `original_max_position_embeddings`, the model's own config has to be read; then the preflight checks it.
    rope = base.rope if isinstance(base, Pretrained) else None
    if rope and rope.longest and packing.longest > rope.longest:
        raise SnaketuneError(
            f"{key}.packing.length: {packing.longest} tokens, but base.rope makes {rope.longest} positions (factor "
            f"{rope.factor:g} x {rope.original_max_position_embeddings}); lower packing.length or raise the factor"
        )


def _check_training(key: str, training: Training) -> None:
    """Check that the optimizer's package is installed, and that no key is set that optimizer or schedule don't use."""
    optimizer, schedule = training.optimizer, training.schedule
    if missing := missing_package(optimizer):
        raise SnaketuneError(f"{key}.optimizer: {missing}")
    if training.warmup_fraction and "warmup_fraction" in training.model_fields_set and not SCHEDULES[schedule].warms_up:
        raise SnaketuneError(
            f"{key}.warmup_fraction: found {training.warmup_fraction:g}, but schedule {schedule!r} has no warm-up; choose "
            "constant_with_warmup, or 0 here"
        )
    default = Training.model_fields["betas"].default
    if training.betas != default and not OPTIMIZERS[optimizer].betas:
        raise SnaketuneError(
            f"{key}.betas: found {list(training.betas)}, but optimizer {optimizer!r} has none; remove them, or use the "
            f"default, {list(default)}"
        )


def _known(key: str, name: str, section: Iterable[str], section_name: str) -> None:
    if name not in section:
        raise SnaketuneError(f"{key}: there is no {name!r} under `{section_name}:`{unknown(name, section)}")


def _check_corpus(key: str, name: str, config: Workflow, *kinds: str) -> None:
    _known(key, name, config.corpora, "corpora")
    if config.corpora[name].kind not in kinds:
        raise SnaketuneError(f"{key}: {name!r} is of kind {config.corpora[name].kind}, expected {' or '.join(kinds)}")


def _check_selection(key: str, run: Run, config: Workflow) -> None:
    """Check that weights can be averaged, and that held-out rows can decide which are kept and when to stop, if they are to."""
    training = run.training
    if training.average and run.operation.launch == "deepspeed":
        raise SnaketuneError(f"{key}.average isn't supported with operation.launch: deepspeed; use fsdp, or remove it")
    if not training.selects:
        return
    decides = f"{key}.{'keep' if training.keep == 'best' else 'stop_if'}"
    if config.corpora[run.corpus].held_out == 0:
        raise SnaketuneError(
            f"{decides}: it decides by held-out rows, and corpora.{run.corpus}.held_out is 0; raise it, or remove this key"
        )
    if run.packing.strategy == "none":
        raise SnaketuneError(
            f"{decides}: unpacked rows (packing.strategy: none) aren't measured during training; choose another strategy"
        )
    if training.keep == "best" and run.operation.launch == "deepspeed":
        raise SnaketuneError(
            f"{key}.keep: best isn't supported with operation.launch: deepspeed; use fsdp, or keep: last"
        )
    has = ("loss",) if isinstance(run, Sft) else ("loss", "accuracy", "margin")
    if isinstance(run, Dpo) and run.unpaired:
        has = ("loss", "margin")
    if training.metric not in has:
        raise SnaketuneError(f"{key}.metric: found {training.metric}, but this run has only {', '.join(has)}; use loss")


def _check_race(key: str, runs: Sequence[Sft | Dpo], config: Workflow) -> None:
    """Raise SnaketuneError if the variants of a grid can't be compared on the same held-out rows. Args: runs: the variants."""
    race = runs[0].race
    if race is None and not any(run.race for run in runs):
        return
    if race is None or any(run.race != race for run in runs):
        raise SnaketuneError(f"{key}: the grid varies it, but it compares all variants; remove it from `grid`")
    if len(runs) <= race.keep:
        many = f"the grid has {len(runs)} variants" if len(runs) > 1 else "there is no grid whose variants it compares"
        raise SnaketuneError(f"{key}.keep: found {race.keep}, but {many}; expected fewer than there are variants")
    if any(run.training.until for run in runs):
        raise SnaketuneError(f"{key}: variants of a race aren't cut by training.until; remove one of them")
    is_sft = isinstance(runs[0], Sft)
    if (race.metric in OF_SFT) != is_sft:
        expected = OF_SFT if is_sft else [name for name in get_args(RaceMetric) if name not in OF_SFT]
        raise SnaketuneError(f"{key}.metric: found {race.metric}; expected {', '.join(expected)}")
    for run in runs:
        if isinstance(run, Dpo) and run.unpaired:
            raise SnaketuneError(
                f"{key}: loss {run.loss} trains on single completions, and a race compares pairs; remove it"
            )
        has_reference = isinstance(run, Dpo) and run.needs_reference and not run.quantization
        if race.metric in NEEDS_REFERENCE and not has_reference:
            raise SnaketuneError(
                f"{key}.metric: {race.metric} needs the reference's log-probabilities, which a variant doesn't have (its loss "
                "has no reference, or its weights are in 4 bits); choose logp_accuracy or logp_margin_nats"
            )
        first = runs[0].corpus, runs[0].packing, config.tokenizer_of(runs[0])
        if (run.corpus, run.packing, config.tokenizer_of(run)) != first:
            raise SnaketuneError(
                f"{key}: variants have different held-out rows; vary neither corpus, packing nor tokenizer"
            )
    if config.corpora[runs[0].corpus].held_out == 0:
        raise SnaketuneError(
            f"{key}: corpora.{runs[0].corpus}.held_out is 0, so there are no rows to compare on; raise it"
        )
    if runs[0].packing.strategy == "none":
        raise SnaketuneError(
            f"{key}: unpacked rows (packing.strategy: none) can't be evaluated; choose another strategy"
        )


def _check_train_corpus(key: str, name: str, config: Workflow, *kinds: str) -> None:
    _check_corpus(f"{key}.corpus", name, config, *kinds)
    if config.corpora[name].held_out == 1:
        raise SnaketuneError(f"{key}.corpus: {name!r} holds out all rows (held_out: 1), so there are none to train on")


def _check_held_out_corpus(key: str, name: str, config: Workflow, *kinds: str) -> None:
    _check_corpus(key, name, config, *kinds)
    if config.corpora[name].held_out == 0:
        raise SnaketuneError(
            f"{key}: corpora.{name}.held_out is 0, so it has no held-out rows; raise held_out, or name another corpus"
        )


def _check_document_packing(key: str, packing: Packing) -> None:
    if "train_on" in packing.model_fields_set and packing.train_on != "all":
        raise SnaketuneError(
            f"{key}.packing.train_on: every token of a document is supervised, so the only value is `all`; remove it"
        )
    if packing.strategy == "none":
        raise SnaketuneError(
            f"{key}.packing.strategy: with `none`, TRL's trainer applies a chat template, which documents don't have; choose "
            "best-fit-decreasing or wrapped"
        )
