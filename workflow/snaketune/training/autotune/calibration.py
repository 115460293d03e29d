"""What the `calibrate` stage measures: in which portions a training is fastest on this device; in launched processes.

Small steps of real rows, from one row per forward pass upwards, until memory runs out or more rows gain nothing; where memory
is what ended it, again with recomputed activations. The optimizer step keeps its rows, so whatever is chosen learns the same.

    rows at once   1      2      4      8      16             1      2 …
    activations    kept                        out of memory  recomputed
    tokens/s       3.1k   5.4k   7.9k   8.8k                  2.4k   …

    curve.json: device, memory_bytes, batch_rows, processes, trials, best

It is made of measured times, so it is another one each time; no training's fingerprint holds it.
"""

from dataclasses import asdict, replace
from typing import Any

import torch
from accelerate.utils import gather_object

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.models.device_memory import host_limit, ran_out, start_again
from snaketune.models.load_model import load_base, read_config, scratch_config
from snaketune.packing.reader import EqualTokens, PackedRows
from snaketune.packing.shards import FORMAT_VERSIONS
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import CalibrateSpec, SftSpec
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.autotune.batch_plan import CURVE, RAN_OUT, Portions, best_of, divisors, tell, tell_ran_out
from snaketune.training.autotune.search import Trial, Trials, search
from snaketune.training.autotune.timed_steps import Timing, time_steps
from snaketune.training.launch.worker import is_main_process
from snaketune.training.loop.pipeline import check_machine, ready_trainer
from snaketune.training.loop.sft_trainer import SftTrainer
from snaketune.training.loop.trainer import BaseTrainer, TrainingRun
from snaketune.training.loop.trl_trainer import RawRows, RawTrainer
from snaketune.training.preference.dpo_trainer import DpoTrainer
from snaketune.training.preference.pair_dataset import PairRows

GB = 1e9


def measure_curve(
    spec: CalibrateSpec,
    work: WorkFolder,
    *,
    operation: Execution,
    pack: Artifact,
    tokenizer: Artifact,
) -> Outcome:
    """Fill `work.payload` with `curve.json`.

    Raises:
        SnaketuneError: such a model can't be trained on such rows here, in any portions.
    """
    tokenizer.files()
    run = TrainingRun.of(spec.run, operation, work)
    rows, trainer_class = _rows(spec, pack, tokenizer, run)
    chat = ChatTokenizer.load(tokenizer.folder)
    base_config = read_config(spec.base) or scratch_config(spec.base, chat)
    run = run.with_kernel_for(base_config, dropout=trainer_class.drops_out)
    # The smallest portions that it may come to.
    smallest = Portions(micro_batch_rows=1, gradient_checkpointing=spec.gradient_checkpointing is not False)
    check_machine(trainer_class, rows, replace(run, operation=smallest.put_in(operation)), base_config)
    items = len(EqualTokens(rows)) if isinstance(rows, PackedRows) else len(rows)
    possible = [
        n for n in divisors(run.spec.training.batch_rows, spec.processes) if n == 1 or n * spec.processes <= items
    ]
    bench = _Bench(spec, run, rows, trainer_class, chat)
    trials = []
    for trial in search(possible, spec.gradient_checkpointing, bench.measure):
        trials.append(trial)
        if is_main_process():
            print(_line(trial), flush=True)
    fitting = [one for one in trials if one["fits"]]
    if not fitting:
        raise SnaketuneError(
            f"not even {_portions(trials[-1])} fit: {trials[-1]['why']}; lower "
            "packing.length, use `lora` with `quantization`, or operation.launch: fsdp on more GPUs"
        )
    curve = {
        "device": bench.device,
        "memory_bytes": bench.memory,
        "batch_rows": run.spec.training.batch_rows,
        "processes": spec.processes,
        "trials": trials,
        "best": best_of(fitting),
    }
    if is_main_process():
        write_json(work.payload / CURVE, curve)
        _tell(curve, spec, operation)
    return Outcome(counts={"trials": len(trials), "fitting": len(fitting)}, about=run.compute.about())


class _Bench:
    """On which trials are made, each with a model of its own; what was measured is kept in the work folder."""

    def __init__(
        self, spec: CalibrateSpec, run: TrainingRun, rows: Any, trainer_class: type[BaseTrainer], chat: ChatTokenizer
    ):
        self.spec, self.run, self.rows, self.trainer_class, self.chat = spec, run, rows, trainer_class, chat
        self.kept = Trials(run.work.state)
        # A trial may have lowered it.
        self.threads = torch.get_num_threads()
        device = run.compute.device
        if device.type == "cuda":
            self.device = torch.cuda.get_device_name(device)
            self.memory = torch.cuda.get_device_properties(device).total_memory
        else:
            self.device, self.memory = device.type, host_limit()

    def measure(self, portions: Portions, before: list[Trial]) -> Trial:
        """A trial, made now or known from before. Args: before: those with the same kind of activations."""
        trial = self.kept.get(portions)
        # All processes look before any of them writes.
        trial = trial if all(gather_object([trial is not None])) else self._try(portions, before)
        if is_main_process():
            self.kept.add(portions, trial)
        return trial

    def _try(self, portions: Portions, before: list[Trial]) -> Trial:
        trial = asdict(portions) | {"accumulation": self._accumulation(portions), "fits": False}
        # Each looks at its own host, and all have to decide alike.
        if why := next(filter(None, gather_object([self._cannot(portions, before)])), ""):
            return trial | {"why": why}
        start_again(self.run.compute.device)
        torch.set_num_threads(self.threads)
        try:
            timing = self._time(portions)
        except Exception as error:
            if not ran_out(error):
                raise
            trial["why"] = str(error).strip().partition("\n")[0]
            if self.spec.processes > 1:
                # The others wait for this one in the middle of a step; all begin again after this trial.
                self.kept.add(portions, trial)
                tell_ran_out(self.run.work.state, None, error)
                raise
            (self.run.work.state / RAN_OUT).unlink(missing_ok=True)
            return trial
        tokens, seconds = timing.tokens * trial["accumulation"], timing.step_s(trial["accumulation"])
        return (
            trial
            | {"fits": True, "why": ""}
            | {"tokens_per_second": round(tokens / seconds, 1)}
            | {"micro_batch_s": timing.micro_batch_s, "optimizer_s": timing.optimizer_s}
            | {"peak_bytes": timing.peak_bytes, "reserved_bytes": timing.reserved_bytes}
        )

    def _accumulation(self, portions: Portions) -> int:
        return self.run.spec.training.batch_rows // (portions.micro_batch_rows * self.spec.processes)

    def _time(self, portions: Portions) -> Timing:
        run = replace(self.run, operation=portions.put_in(self.run.operation))

        def load(weights_dtype, quantization):
            return load_base(self.spec.base, self.chat, weights_dtype=weights_dtype, quantization=quantization)

        with ready_trainer(self.trainer_class, self.rows, run, load, read_config(self.spec.base)) as made:
            return Timing.of_all(gather_object([time_steps(made.trainer)]))

    def _cannot(self, portions: Portions, before: list[Trial]) -> str:
        """Why it isn't tried: a host whose memory runs out gets slow, or kills, and raises nothing."""
        fitted = [one for one in before if one["fits"]]
        limit = None if self.run.compute.device.type == "cuda" else host_limit()
        if limit is None or len(fitted) < 2:
            return ""
        (rows_0, peak_0), (rows_1, peak_1) = ((one["micro_batch_rows"], one["peak_bytes"]) for one in fitted[-2:])
        needed = peak_1 + (peak_1 - peak_0) / (rows_1 - rows_0) * (portions.micro_batch_rows - rows_1)
        return f"would take {needed / GB:.1f} GB, and there are {limit / GB:.1f}" if needed > limit else ""


def _rows(
    spec: CalibrateSpec, pack: Artifact, tokenizer: Artifact, run: TrainingRun
) -> tuple[PackedRows | RawRows, type[BaseTrainer]]:
    in_memory = run.operation.load_in_memory
    if not isinstance(spec.run, SftSpec):
        return PairRows(pack, None, in_memory), DpoTrainer
    if pack.manifest.get("format_version") == FORMAT_VERSIONS["sft"]:
        return PackedRows(pack, "train", in_memory), SftTrainer
    return RawRows(pack, tokenizer.folder), RawTrainer


def _line(trial: Trial) -> str:
    what = _portions(trial)
    if not trial["fits"]:
        return f"{what}: {trial['why']}"
    return f"{what} x {trial['accumulation']}: {trial['tokens_per_second']:,.0f} tokens/s, {trial['peak_bytes'] / GB:.2f} GB"


def _portions(trial: Trial) -> Portions:
    return Portions(**{name: trial[name] for name in ("micro_batch_rows", "gradient_checkpointing")})


def _tell(curve: dict[str, Any], spec: CalibrateSpec, operation: Execution) -> None:
    print(
        f"best: {_portions(curve['best'])}, {curve['best']['tokens_per_second']:,.0f} tokens/s on {curve['device']}",
        flush=True,
    )
    if operation.micro_batch_rows != "auto":
        # Chosen by hand, by the run that this was measured for.
        recomputed = spec.gradient_checkpointing is True
        chosen = Portions(micro_batch_rows=operation.micro_batch_rows, gradient_checkpointing=recomputed)
        if told := tell(chosen, curve):
            print(told, flush=True)
