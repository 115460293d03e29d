"""Initial weights and reference of a DPO run: the SFT model trained in full or with new adapters, its own adapter trained
further, on 4-bit weights, or with another model as the reference."""

import math
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.base_models import Pretrained
from snaketune.config.lora import Lora, Quantization
from snaketune.engine.model.devices import resolve_compute
from snaketune.errors import SnaketuneError
from snaketune.models.adapter_stack import ADAPTER
from snaketune.models.load_model import load_pretrained
from snaketune.sampling import sampled
from snaketune.stages.specs import DpoSpec, RefLogpsSpec
from snaketune.tables import read_table
from snaketune.training import dpo
from snaketune.training.reference import gather as ref_logps
from snaketune.training.reference.logps_table import FILE
from tests.models.conftest import tiny_model
from tests.training.executed import executed
from tests.training.pipeline_runs import Interrupted, stop_after

from .test_adapter_stacks import SECOND, Chain, Made, training

FIRST = Lora(rank=4, modules_to_save=("embed_tokens",))
FOUR_BITS = Quantization()


def base_in(folder: Path, dtype: torch.dtype = torch.float32) -> Made:
    model = tiny_model("llama", hidden_size=64, intermediate_size=64, num_key_value_heads=4)
    model.to(dtype).save_pretrained(folder / "base")
    return Made([], Pretrained(path=str(folder / "base")))


class Run:
    """A DPO run from an SFT run with adapters."""

    def __init__(self, chain: Chain, sft: Made, base: Made, other: Made | None = None, **settings):
        """Args: other: the reference, if it is another result than the one that the run starts from."""
        continued = settings.get("continued", False)
        self.chain, self.external, self.other = chain, settings.get("reference"), other
        settings |= {"reference": "result"} if other else {}
        # An adapter that is trained further needs its base layers, whether its run merged it or not.
        self.start = Made([*sft.results[:1], *base.results], base.base) if continued else sft
        self.spec = DpoSpec(
            loss="sigmoid", beta=0.5, base=self.start.base, trust_remote_code=False,
            training=training(epochs=3, warmup_fraction=0),
            **({"lora": None, "quantization": None} | settings),
        )  # fmt: skip

    def refer(self, name: str = "reference") -> Artifact:
        spec, external = self.spec, self.external
        reference_spec = RefLogpsSpec(
            precision=spec.training.precision, frozen_weights=bool(external or self.other or spec.lora),
            base=self.other.base if self.other else external or spec.base,
            quantization=None if external else spec.quantization, apart=spec.continued and not external,
            trust_remote_code=False,
        )  # fmt: skip
        work = self.chain.work(name)
        inputs = {"tokenizer": [self.chain.tokenizer]} if external else (self.other or self.start).inputs
        outcome = ref_logps.build(reference_spec, work, pack=self.chain.pairs, **inputs)
        contents = {role: [artifact.content for artifact in artifacts] for role, artifacts in inputs.items()}
        return self.chain.finish(
            work, outcome, reference_spec, contents | {"pack": [self.chain.pairs.manifest["pairs"]]}
        )

    def train(self, name: str, reference: Artifact, **operation):
        work = self.chain.work(name)
        outcome = dpo.build(
            self.spec,
            work,
            operation=executed(self.spec.training, log_steps=1, **operation),
            pack=self.chain.pairs,
            ref_logps=[reference],
            model=self.start.results[0],
            base_layers=self.start.results[1:],
            reference=self.other.results if self.other else [],
        )
        return self.chain.finish(work, outcome, self.spec, self.start.contents), [
            entry["loss"] for entry in outcome.run["history"]
        ]


KINDS = {
    "full": {},
    "lora": {"lora": SECOND},
    "continued": {"lora": FIRST, "continued": True},
    "qlora": {"lora": SECOND, "quantization": FOUR_BITS},
    "continued in 4 bits": {"lora": Lora(rank=4), "continued": True, "quantization": FOUR_BITS},
}
# Each branch once; the others combine them.
EACH = {"full", "continued", "qlora"}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind in EACH else pytest.mark.slow) for kind in KINDS])
def test_every_kind_trains_from_its_reference_and_resumes(tmp_path, tokenizer, monkeypatch, kind):
    settings = KINDS[kind]
    base, chain = base_in(tmp_path), Chain(tmp_path, tokenizer, merge=True)
    # The SFT run's adapter has dropout, which is off from here on.
    first = settings["lora"].model_copy(update={"dropout": 0.1}) if settings.get("continued") else FIRST
    sft = chain.sft("sft", base, first, settings.get("quantization"))
    run = Run(chain, sft, base, **settings)
    reference = run.refer()
    straight, losses = run.train("straight", reference)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < losses[0]
    with monkeypatch.context() as patch:
        stop_after(1, patch)
        with pytest.raises(Interrupted):
            run.train("resumed", reference, checkpoint_steps=2)
    resumed, _ = run.train("resumed", reference, checkpoint_steps=2)
    named = {name: entry["digest"] for name, entry in straight.manifest["payload"].items()}
    assert {name: entry["digest"] for name, entry in resumed.manifest["payload"].items()} == named
    assert "model.safetensors" in named


@pytest.mark.parametrize("merge", [True, False])
def test_a_second_run_starts_from_the_first_and_may_keep_its_reference(tmp_path, tokenizer, merge):
    base, chain = base_in(tmp_path), Chain(tmp_path, tokenizer, merge)
    sft = chain.sft("sft", base, FIRST)
    start = Run(chain, sft, base, lora=SECOND.model_copy(update={"merge": merge}))
    first, losses = start.train("first", start.refer())
    trained = Made([first]) if merge else Made([first, *sft.results], sft.base)
    kept = Run(chain, trained, base, other=sft, lora=SECOND)
    _, kept_losses = kept.train("kept", kept.refer("kept-reference"))
    # It continues from the end of the first run, as its loss against the same reference shows.
    assert kept_losses[0] < losses[-1] + 1e-3 and kept_losses[0] < math.log(2) - 1e-3
    moved = Run(chain, trained, base, lora=SECOND)
    reference = moved.refer("moved-reference")
    _, moved_losses = moved.train("moved", reference)
    assert moved_losses[0] == pytest.approx(math.log(2), abs=1e-6)
    with pytest.raises(SnaketuneError, match=r"doesn't belong to this run .model: "):
        kept.train("wrong", reference)


SETTINGS = [{"save_dtype": "bfloat16"}, {"precision": "bfloat16"}, {"precision": "auto"}]
ZERO = list(product(SETTINGS, ("full", "lora", "continued"), (True, False)))
ZERO_EACH = [
    (SETTINGS[0], "full", True),
    (SETTINGS[1], "full", False),
    (SETTINGS[1], "lora", True),
    (SETTINGS[1], "continued", False),
]


@pytest.mark.parametrize(
    ("settings", "kind", "merge"),
    [pytest.param(*case, marks=[] if case in ZERO_EACH else pytest.mark.slow) for case in ZERO],
)
def test_a_run_with_negligible_learning_rate_has_rewards_of_zero(
    tmp_path, tokenizer, monkeypatch, settings, kind, merge
):
    """Despite rounding in merging adapters, the evaluated model is the one that its run started from."""
    precision = settings.get("precision", "auto")
    monkeypatch.setattr(sampled, "resolve_compute", lambda _: resolve_compute(precision))
    base, chain = base_in(tmp_path), Chain(tmp_path, tokenizer, merge)
    sft = chain.sft("sft", base, FIRST, learning_rate=0.05, **settings)
    options = KINDS[kind]
    if lora := options.get("lora"):
        options = options | {"lora": lora.model_copy(update={"merge": merge})}
    run = Run(chain, sft, base, **options)
    run.spec = run.spec.model_copy(update={"training": training(learning_rate=1e-30, **settings)})
    reference = run.refer()
    made, losses = run.train("dpo", reference)
    assert losses == pytest.approx([math.log(2)] * len(losses), abs=1e-6)
    below = {"full": None, "lora": sft, "continued": base}[kind]
    result = Made([made]) if merge or below is None else Made([made, *below.results], below.base)
    scores = chain.scores("scores", result, [reference])["preferences"]["pairs"]
    assert scores["pairs_with_reference"] == 2
    rewards = ("reward_margin_nats", "chosen_reward_nats", "rejected_reward_nats", "reward_accuracy")
    assert [scores[name] for name in rewards] == [0.0, 0.0, 0.0, 0.5]


@pytest.mark.parametrize("merge", [True, False])
def test_an_adapter_that_is_trained_further_has_the_shape_of_its_sft_run(tmp_path, tokenizer, merge):
    base, chain = base_in(tmp_path), Chain(tmp_path, tokenizer, merge)
    sft = chain.sft("sft", base, FIRST)
    merged = Run(chain, sft, base, lora=SECOND)
    run = Run(chain, sft, base, lora=FIRST.model_copy(update={"merge": merge}), continued=True)
    apart = run.refer("apart")
    references = [read_table(one.file(FILE)) for one in (merged.refer("merged"), apart)]
    # Merged or not, it is the same model.
    np.testing.assert_allclose(references[0]["logp"], references[1]["logp"], rtol=1e-5)
    made, losses = run.train("dpo", apart)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    result = Made([made], None) if merge else Made([made], base.base)
    ours = result.stack(tokenizer).load(torch.float32).state_dict()
    # The adapter, applied to the base by peft, gives the result.
    from peft import PeftModel

    named = (made.folder / ADAPTER / "adapter_config.json").read_text()
    assert str(tmp_path / "base") in named
    below = Made([], base.base).stack(tokenizer).load(torch.float32)
    theirs = PeftModel.from_pretrained(below, made.folder / ADAPTER).merge_and_unload().state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-5, rtol=1e-4)
    # Training changed the SFT run's adapter.
    before = sft.stack(tokenizer).load(torch.float32).state_dict()
    assert any((tensor != before[name]).any() for name, tensor in ours.items())
    assert ("model.safetensors" in made.manifest["payload"]) == merge


@pytest.mark.parametrize("merge", [True, False])
def test_the_reference_under_adapters_is_that_of_the_merged_weights(tmp_path, tokenizer, merge):
    base, chain = base_in(tmp_path), Chain(tmp_path, tokenizer, merge)
    two = chain.sft("two", chain.sft("one", base, FIRST), SECOND)
    whole = two.stack(tokenizer).load(torch.float32)
    whole.save_pretrained(tmp_path / "whole")
    for path in tokenizer.folder.iterdir():
        shutil.copy(path, tmp_path / "whole")
    merged = Artifact(
        tmp_path / "m.json", {"payload": describe_files(tmp_path / "whole"), "records": {}}, tmp_path / "whole"
    )
    tables = [
        read_table(Run(chain, start, base, lora=lora).refer(f"{number}-{bool(lora)}").file(FILE))
        for number, start in enumerate((two, Made([merged])))
        for lora in (None, SECOND)
    ]
    # In float32, frozen weights and master weights are the same.
    for other in tables[1:]:
        assert other.equals(tables[0])


def external_in(folder: Path, chain: Chain, **settings) -> Pretrained:
    size = load_size(chain)
    torch.manual_seed(5)
    tiny_model("qwen2", vocab_size=size, **settings).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(chain.tokenizer.folder / name, folder)
    return Pretrained(path=str(folder))


def load_size(chain: Chain) -> int:
    from snaketune.tokenization.chat import ChatTokenizer

    return ChatTokenizer.load(chain.tokenizer.folder).vocab_size


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.slow), "qlora", "continued"])
def test_another_model_can_be_the_reference_of_any_kind(tmp_path, tokenizer, kind):
    base, chain = base_in(tmp_path), Chain(tmp_path, tokenizer, merge=True)
    # More embedding rows than tokens, as in many models.
    external = external_in(tmp_path / "external", chain)
    run = Run(
        chain, chain.sft("sft", base, FIRST, KINDS[kind].get("quantization")), base, reference=external, **KINDS[kind]
    )
    reference = run.refer()
    assert reference.manifest["weights_dtype"] == "float32"
    _, losses = run.train("dpo", reference)
    # The reference isn't the policy, so non-zero first log-ratios are no error.
    assert losses[0] != pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < losses[0]
    own = Run(chain, run.start if kind != "continued" else Made(run.start.results[:1]), base)
    with pytest.raises(SnaketuneError, match=r"doesn't belong to this run \(model: "):
        own.train("wrong", reference)


def test_a_reference_of_another_vocabulary_is_refused(tmp_path, tokenizer):
    base, chain = base_in(tmp_path), Chain(tmp_path, tokenizer, merge=True)
    external = external_in(tmp_path / "external", chain)
    run = Run(chain, chain.sft("sft", base, FIRST), base, reference=external)
    file = tmp_path / "external/tokenizer.json"
    from tokenizers import Tokenizer, models

    vocabulary = Tokenizer.from_file(str(file)).get_vocab()
    turned = dict(zip(vocabulary, reversed(list(vocabulary.values())), strict=True))
    Tokenizer(models.WordLevel(turned, unk_token=next(iter(turned)))).save(str(file))
    with pytest.raises(SnaketuneError, match=r"dpo\.reference: \d+ of \d+ tokens are different in"):
        run.refer()
    file.unlink()
    with pytest.raises(SnaketuneError, match=r"has no tokenizer\.json"):
        run.refer()
    shutil.rmtree(tmp_path / "external")
    with pytest.raises(SnaketuneError, match="external"):
        run.refer()


def test_a_continued_adapter_that_does_not_fit_is_refused(tmp_path, tokenizer):
    base, chain = base_in(tmp_path), Chain(tmp_path, tokenizer, merge=True)
    run = Run(chain, chain.sft("sft", base, FIRST), base, lora=Lora(rank=8), continued=True)
    reference = run.refer()
    with pytest.raises(SnaketuneError, match="does not fit its base model"):
        run.train("dpo", reference)


def test_a_quantized_base_is_in_4_bits(tmp_path, tokenizer):
    """Without this the tests above wouldn't cover QLoRA."""
    base_in(tmp_path)
    model = load_pretrained(
        Pretrained(path=str(tmp_path / "base")), weights_dtype=torch.float32, quantization=FOUR_BITS
    )
    assert any(type(parameter).__name__ == "Params4bit" for parameter in model.parameters())


def test_a_reference_that_stays_unmerged_keeps_the_pairs_of_each_split_by_its_own_model(tmp_path, tokenizer):
    torch.set_num_threads(1)
    base, chain = base_in(tmp_path), Chain(tmp_path, tokenizer, merge=False)
    sft = chain.sft("sft", base, FIRST)
    run = Run(chain, sft, base, lora=FIRST, continued=True)
    first, again = run.refer("first"), run.refer("again")
    assert first.file(FILE).read_bytes() == again.file(FILE).read_bytes()
    assert len(first.manifest["rows"]) == 2
    # The same adapter merged for all pairs is another computation.
    merged = Run(chain, sft, base, lora=SECOND).refer("merged")
    assert not {*merged.manifest["rows"]} & {*first.manifest["rows"]}
