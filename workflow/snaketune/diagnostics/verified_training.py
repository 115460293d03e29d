"""All checks of one finished training, in the order of verify.json: the work of the `verification` stage.

Its own trainer computes gradients, as in the training; then its saved weights are loaded by transformers in float32, and every
text is computed alone. What can't be checked here is listed with the reason.
"""

import importlib.util
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from transformers import AutoConfig, PreTrainedModel

from snaketune.artifacts.manifest import Artifact, read_json
from snaketune.artifacts.split_files import read_split
from snaketune.config.operation import Execution
from snaketune.corpus.rows import TEXT
from snaketune.diagnostics.checks import gradients, recomputed, responses, sequences, turns, weights
from snaketune.diagnostics.checks.check import Check, attempted
from snaketune.diagnostics.verified import FILE, as_text, counts_of
from snaketune.engine.model.attention import use_own_attention
from snaketune.engine.model.devices import Compute, resolve_compute
from snaketune.engine.model.forward import inner_model
from snaketune.engine.model.logit_differences import TOLERANCE
from snaketune.engine.model.text_part import auto_class
from snaketune.engine.packing.rows import PackedRows
from snaketune.errors import SnaketuneError, first_line
from snaketune.evaluation.held_out_prompts import held_out_prompts
from snaketune.files import write_json
from snaketune.models.adapter_stack import ADAPTER, AdapterStack, is_adapter_only
from snaketune.models.load_model import stored_dtype
from snaketune.packing.reader import documents, open_rows
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import EvalSpec, RefLogpsSpec, SftSpec, VerificationSpec
from snaketune.tables import read_table
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.prepared import PreparedTraining, TrainingRun
from snaketune.training.prepared_dpo import prepare_dpo
from snaketune.training.prepared_sft import prepare_sft
from snaketune.training.reference.frozen_model import FrozenModel
from snaketune.training.reference.logps_table import read_ref_logps

# Tokens whose logits are compared: two copies of 150,000 logits each take 5 GB.
LOGITS_OF = 4096
# By the type of a GGUF file.
OF_GGUF = {"f16": torch.float16, "bf16": torch.bfloat16, "q8_0": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class FinishedTraining:
    """A finished training and its inputs; the attributes are those of `verification.build`."""

    spec: VerificationSpec
    work: WorkFolder
    operation: Execution
    model: Artifact
    start: tuple[Artifact, ...]
    pack: Artifact
    tokenizer: Sequence[Artifact]
    ref_logps: Sequence[Artifact]
    reference: Sequence[Artifact]
    corpus: Artifact
    evaluation: Sequence[Artifact]
    evaluated: Sequence[Artifact]
    prompted: Sequence[Artifact]
    gguf: Sequence[Artifact]

    @cached_property
    def training(self) -> PreparedTraining:
        """The training as it was, on its rows, from its initial weights."""
        operation = self.operation.model_copy(update={"micro_batch_rows": 1, "gradient_checkpointing": False})
        run = TrainingRun.of(self.spec.run, operation, self.work)
        if isinstance(self.spec.run, SftSpec):
            training = prepare_sft(run, self.pack, self.tokenizer[0], self.start)
        else:
            training = prepare_dpo(run, self.start, self.pack, *self.ref_logps, reference=self.reference)
        if not isinstance(training.rows, PackedRows):
            raise SnaketuneError("its rows aren't packed")
        return training

    @cached_property
    def initial(self) -> AdapterStack:
        """The model that its adapter was trained on, or that it started from."""
        run = self.spec.run
        layers = self.start[1:] if getattr(run, "continued", False) else self.start
        folder, trusted = self.model.folder, run.trust_remote_code
        return AdapterStack(results=layers, base=run.base, tokenizer=folder, trust_remote_code=trusted)

    @cached_property
    def saved(self) -> AdapterStack:
        """The trained model."""
        if is_adapter_only(self.model):
            return replace(self.initial, results=(self.model, *self.initial.results))
        trusted = self.spec.run.trust_remote_code
        return AdapterStack(results=(self.model,), tokenizer=self.model.folder, trust_remote_code=trusted)

    @property
    def as_trained(self) -> PreparedTraining:
        """The training with the trained weights, or with the trained adapter on its base."""
        run = self.spec.run
        if run.lora is None:
            return self.as_saved
        # Others were saved relative to the base, with twice the rank.
        adapter = None if run.lora.changes_base else self.model.folder / ADAPTER
        return replace(self.training, run=replace(self.training.run, adapter=adapter))

    @property
    def as_saved(self) -> PreparedTraining:
        """The training with the saved weights, without adapters."""
        learning = self.spec.run.training.model_copy(update={"keep": "last", "stop_if": None, "average": None})
        spec = self.spec.run.model_copy(update={"lora": None, "quantization": None, "training": learning})
        run = replace(self.training.run, spec=spec, adapter=None)
        return replace(self.training, run=run, initial=self.saved)

    @property
    def dtype(self) -> torch.dtype:
        """The data type in which its weights were saved."""
        return getattr(torch, self.model.manifest["saved_dtype"])

    @cached_property
    def chat(self) -> ChatTokenizer:
        return ChatTokenizer.load(self.model.folder)

    @cached_property
    def compute(self) -> Compute:
        return resolve_compute("float32")

    def plain(self, **arguments: Any) -> PreTrainedModel:
        """The saved model by transformers alone, in float32."""
        trusted, folder = self.spec.run.trust_remote_code, str(self.model.folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
        made = auto_class(config, folder).from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=trusted, **arguments
        )
        return made.to(self.compute.device).eval()

    @cached_property
    def loaded(self) -> PreTrainedModel:
        """The saved model in float32; of an adapter alone, with its base."""
        if is_adapter_only(self.model):
            return self.saved.load(torch.float32).to(self.compute.device).eval()
        return self.plain()

    @cached_property
    def held_out(self) -> list[sequences.Sequence]:
        """The sequences of some held-out rows; of trained ones, if none is held out."""
        found = [self.sequences_of(split) for split in ("held_out", "train")]
        return found[0] or found[1]

    def sequences_of(self, split: str) -> list[sequences.Sequence]:
        rows = open_rows(self.pack, split)
        chosen = (rows[number] for number in sequences.random_rows(rows, self.spec.rows))
        return [sequence for row in chosen for document in sequences.documents_of(row) for sequence in document]

    @cached_property
    def conversations(self) -> list[turns.Conversation]:
        """Conversations, or pairs, of some training rows. SnaketuneError: the corpus has none."""
        rows, listed = open_rows(self.pack, "train"), list(documents(self.pack, "train"))
        chosen = sequences.random_rows(rows, self.spec.rows)
        ids = pa.array([document["id"] for document in listed if document["row"] in {*chosen}], pa.string())
        corpus = read_split(self.corpus, "train")
        read = corpus.filter(pc.is_in(corpus["id"], value_set=ids)).to_pylist()
        if any(turn["role"] == TEXT for row in read for turn in row.get("messages", ())):
            raise SnaketuneError("its rows are text without turns")
        return turns.conversations_in(rows, chosen, listed, read)

    @property
    def texts(self) -> list[sequences.Sequence]:
        """Those of which logits are compared."""
        return sequences.first_tokens(self.held_out, LOGITS_OF)


def packed(finished: FinishedTraining) -> Check:
    with gradients.first_step_trainer(finished.as_trained, 1, 1) as trainer:
        chosen = sequences.random_rows(finished.training.rows, finished.spec.rows)
        rows = [finished.training.rows[number] for number in chosen]
        return gradients.packed_equals_alone(trainer.model, rows, trainer.compute)


def micro_batches(finished: FinishedTraining) -> Check:
    return gradients.micro_batches_equal(finished.as_trained, finished.spec.rows)


def merged(finished: FinishedTraining) -> Check:
    run, adapter = finished.spec.run, finished.model.folder / ADAPTER
    if run.lora is None or not run.lora.merge:
        raise SnaketuneError("it has no adapter" if run.lora is None else "its adapter isn't merged")
    computed = getattr(torch, finished.model.manifest["dtype"])
    rounded = stored_dtype(finished.initial.config()) or torch.float32 if run.quantization else computed
    base = finished.initial.load(rounded).float().to(finished.compute.device)
    return weights.merged_equals_base_and_adapter(base, adapter, finished.loaded, finished.dtype, finished.texts)


def saved(finished: FinishedTraining) -> Check:
    record = read_json(finished.model.manifest_path.parent / "run.json", {})
    return weights.saved_equals_trained(finished.as_saved, record, finished.dtype)


def bfloat16(finished: FinishedTraining) -> Check:
    in_bfloat16 = finished.saved.load(torch.bfloat16).to(finished.compute.device)
    return weights.bfloat16_equals_float32(finished.loaded, in_bfloat16, finished.texts)


def gguf(finished: FinishedTraining) -> Check:
    if not finished.gguf or finished.spec.gguf_type is None:
        raise SnaketuneError("`gguf:` has no file of it")
    if not importlib.util.find_spec("gguf"):
        raise SnaketuneError("reading a GGUF file needs the package gguf; install it with pip")
    (file,) = finished.gguf[0].files()
    try:
        read = finished.plain(gguf_file=str(file.resolve()))
    except (OSError, ValueError) as error:
        raise SnaketuneError(f"transformers can't read {file.name}: {first_line(error)}") from None
    tolerance = TOLERANCE[OF_GGUF[finished.spec.gguf_type]]
    return weights.gguf_equals_hugging_face(finished.loaded, read, finished.texts, tolerance)


def prompts(finished: FinishedTraining) -> Check:
    return turns.prompts_are_those_of_generate(finished.chat, finished.conversations)


def supervised(finished: FinishedTraining) -> Check:
    return turns.supervised_is_the_answer(finished.chat, finished.conversations)


def end_of_turn(finished: FinishedTraining) -> Check:
    rows = open_rows(finished.pack, "held_out")
    answers = finished.sequences_of("held_out")
    if rows.pairs:
        chosen = sequences.random_rows(rows, finished.spec.rows)
        answers = [sequence for number in chosen for sequence in sequences.completions_of(rows[number])[::2]]
    return turns.end_of_turn_is_learned(finished.loaded, finished.chat.stop_ids, answers)


def reference(finished: FinishedTraining) -> Check:
    if not finished.ref_logps:
        raise SnaketuneError("its loss has no reference")
    stored, run = finished.ref_logps[0], finished.spec.run
    spec = RefLogpsSpec.model_validate_json(json.dumps(stored.manifest["spec"]))
    named = getattr(run, "reference", None)
    results = tuple(finished.reference) if named == "result" else () if named else finished.start
    rows, compute = open_rows(finished.pack, "train"), resolve_compute(spec.precision)
    loaded, tested = FrozenModel(spec, results, finished.start[:1]).load(compute, [rows])
    use_own_attention(inner_model(loaded))
    chosen = sequences.random_rows(rows, finished.spec.rows)
    ids: dict[int, list[str]] = {number: [] for number in chosen}
    for document in documents(finished.pack, "train"):
        ids.get(document["row"], []).append(document["id"])
    dtypes = stored.manifest["dtype"], tested.compute.about()["dtype"]
    dtype = "bfloat16" if "bfloat16" in dtypes else "float32"
    return recomputed.reference_equals_recomputed(
        loaded, rows, chosen, list(ids.values()), read_ref_logps(stored, "train"), dtype, tested.compute.autocast()
    )


def evaluation(finished: FinishedTraining) -> Check:
    if not finished.evaluation:
        raise SnaketuneError("`eval:` has no evaluation of it on held-out rows")
    scores, spec = finished.evaluation[0], finished.spec
    names = [
        *(("losses.arrow", name) for name in spec.conversations),
        *(("pairs.arrow", name) for name in spec.preferences),
    ]
    evaluated = []
    for (file, corpus), pack in zip(names, finished.evaluated, strict=True):
        stored = [row for row in read_table(scores.file(file)).to_pylist() if row["corpus"] == corpus]
        evaluated.append((open_rows(pack, "held_out"), list(documents(pack, "held_out")), stored))
    dtype = scores.manifest["dtype"]
    device = finished.compute.device.type
    cast = torch.autocast(device, dtype=torch.bfloat16) if dtype == "bfloat16" else nullcontext()
    return recomputed.evaluation_equals_recomputed(finished.loaded, evaluated, spec.rows, dtype, cast)


def answers(finished: FinishedTraining) -> Check:
    if not finished.evaluation:
        raise SnaketuneError("`eval:` has no evaluation of it on held-out rows")
    scores = finished.evaluation[0]
    spec = EvalSpec.model_validate_json(json.dumps(scores.manifest["spec"]))
    made, decoding = scores.manifest.get("generation", {}), spec.generation.decoding
    if made.get("strategy") != "greedy" or made["engine"]["name"] != "transformers" or decoding.repetition_penalty != 1:
        raise SnaketuneError("the evaluation has no responses, or they aren't plain greedy ones by transformers")
    lines = [line for line in scores.file("responses.jsonl").read_text(encoding="utf-8").split("\n") if line]
    prompts, encoded = held_out_prompts(spec, finished.chat, finished.prompted)
    stored = [
        responses.Stored(id=prompt.id, prompt=ids, text=line["response"], tokens=line["tokens"])
        for prompt, ids, line in zip(prompts, encoded, map(json.loads, lines), strict=True)
    ]
    chosen = [stored[number] for number in sequences.random_rows(stored, finished.spec.rows)]
    dtype, cut = getattr(torch, scores.manifest["dtype"]), bool(decoding.stop)
    return responses.responses_equal_generated(finished.loaded, finished.chat, chosen, dtype, cut=cut)


CHECKS: dict[str, tuple[str, Callable[[FinishedTraining], Check]]] = {
    gradients.PACKED: ("loss and gradients of packed rows and of their documents", packed),
    gradients.MICRO_BATCHES: ("gradients of a step in micro-batches of 1 and at once", micro_batches),
    weights.MERGED: ("saved weights", merged),
    weights.SAVED: ("held-out loss at the training's end", saved),
    weights.BFLOAT16: ("logits", bfloat16),
    weights.GGUF: ("logits", gguf),
    turns.PROMPTS: (turns.OF_PROMPTS, prompts),
    turns.SUPERVISED: (turns.OF_SUPERVISED, supervised),
    turns.END_OF_TURN: (turns.OF_ENDS, end_of_turn),
    recomputed.REFERENCE: (recomputed.OF_REFERENCE, reference),
    recomputed.EVALUATION: (recomputed.OF_EVALUATION, evaluation),
    responses.RESPONSES: (responses.OF_RESPONSES, answers),
}


def verify_training(finished: FinishedTraining) -> Outcome:
    """Fill `work.payload` with verify.json, and print it as a table."""
    for result in (finished.model, *finished.start):
        result.files()
    checks = []
    for name, (compares, check) in CHECKS.items():
        checks.append(asdict(attempted(name, compares, partial(check, finished))))
        print(as_text(checks[-1:]).splitlines()[-1], flush=True)
    write_json(finished.work.payload / FILE, {"checks": checks})
    run = {"device": str(finished.compute.device)}
    return Outcome(counts=counts_of(checks), about=finished.compute.about(), run=run)
