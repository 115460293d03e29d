"""The `dpo` stage: direct preference optimization on packed pairs, against reference log-probabilities from their artifact.

The prompt of a pair is computed once for both completions, and no reference model is in memory. The loss is the mean over
the pairs of an optimizer step.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.config.runs import Operation
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import DpoSpec
from snaketune.stages.work import WorkFolder
from snaketune.training.launch import is_first_process, launch, passed, read_passed, run_worker, writing


def build(
    spec: DpoSpec, work: WorkFolder, *, operation: Operation, model: Artifact, pack: Artifact, ref_logps: Artifact
) -> Outcome:
    """Fill `work.payload` with a complete model folder: weights, config and tokenizer."""
    return launch(
        "snaketune.training.dpo",
        work,
        {
            "spec": spec.model_dump(mode="json"),
            "operation": operation.model_dump(mode="json"),
            **passed(model=model, pack=pack, ref_logps=ref_logps),
            "work": str(work.folder),
        },
    )


def train(job: dict[str, Any]) -> None:
    """The launched process."""
    work = WorkFolder(Path(job["work"]))
    model = read_passed(job, "model", "model")
    model.files()
    with writing(work):
        outcome = _train(
            DpoSpec.model_validate(job["spec"]),
            Operation.model_validate(job["operation"]),
            work,
            model,
            read_passed(job, "pack", "shards"),
            read_passed(job, "ref_logps", "logps"),
        )
        if is_first_process():
            for name in model.manifest["payload"]:
                # The tokenizer comes along; weights, and an index that tells how they were split, are this run's own.
                weights = name.endswith((".safetensors", ".index.json"))
                if "/" not in name and not weights and not (work.payload / name).exists():
                    shutil.copyfile(model.folder / name, work.payload / name)
            write_json(work.state / "outcome.json", dataclasses.asdict(outcome))


def _train(
    spec: DpoSpec, operation: Operation, work: WorkFolder, model: Artifact, pack: Artifact, ref_logps: Artifact
) -> Outcome:
    import torch

    from snaketune.models.batches import collate
    from snaketune.models.devices import computing
    from snaketune.models.loading import load_folder, read_folder_config
    from snaketune.models.logprobs import pair_logprobs, token_losses
    from snaketune.training.dpo_loss import dpo_loss
    from snaketune.training.engine import train_packed
    from snaketune.training.pairs import PairRows
    from snaketune.training.reference import check_policy_is_reference, check_ref_logps
    from snaketune.training.trainer import PackedTrainer

    class DpoTrainer(PackedTrainer):
        # The reference had none.
        drops_out = False

        @staticmethod
        def collate(rows, kernel):
            batch = collate(rows, kernel)
            batch["reference"] = torch.cat([row["reference"] for row in rows])
            return batch

        def items(self, batch):
            return len(batch["reference"])

        def log_ratios(self, model, batch):
            """Policy to reference: float32[P, 2], and int64[P, 2] tokens."""
            sums_P2, counts_P2 = pair_logprobs(token_losses(model, batch), batch)
            return sums_P2 - batch["reference"], counts_P2

        def check_start(self):
            batch = self._prepare_inputs(self._collate_items([self.train_dataset[0]]))
            trained_P2, counts_P2 = self.log_ratios_before(batch, training=True)
            evaluated_P2, _ = self.log_ratios_before(batch, training=False)
            self.model.train()
            check_policy_is_reference(trained_P2, evaluated_P2, counts_P2, dtype)

        @torch.no_grad()
        def log_ratios_before(self, batch, training):
            """As in training or in evaluation, but without a trace of it."""
            self.model.train(training)
            cuda = [where.index] if where.type == "cuda" else []
            with torch.random.fork_rng(cuda), self.compute_loss_context_manager():
                return self.log_ratios(self.model, batch)

        def batch_loss(self, model, batch):
            ratios_P2, counts_P2 = self.log_ratios(model, batch)
            chosen_P, rejected_P = ratios_P2[:, 0], ratios_P2[:, 1]
            self._count(chosen_P.detach(), rejected_P.detach())
            return dpo_loss(
                chosen_P,
                rejected_P,
                counts_P2,
                loss=spec.loss,
                beta=spec.beta,
                label_smoothing=spec.label_smoothing,
            ).sum()

        def _count(self, chosen_P, rejected_P):
            self.add_to_window(
                items=len(chosen_P),
                accuracy=(chosen_P > rejected_P).sum().item(),
                margin=spec.beta * (chosen_P - rejected_P).sum().item(),
                chosen_reward=spec.beta * chosen_P.sum().item(),
                rejected_reward=spec.beta * rejected_P.sum().item(),
            )

    def load(weights_dtype, quantization):
        return load_folder(
            model.folder,
            weights_dtype=weights_dtype,
            quantization=quantization,
            trust_remote_code=spec.trust_remote_code,
        )

    where, dtype, kernel = computing(spec.training.precision)
    check_ref_logps(ref_logps, model=model, pack=pack, dtype=str(dtype).removeprefix("torch."), kernel=kernel)
    rows = PairRows(pack, ref_logps, operation.load_in_memory)
    config = read_folder_config(model.folder, trust_remote_code=spec.trust_remote_code)
    outcome = train_packed(DpoTrainer, rows, spec, operation, work, load, config)
    return dataclasses.replace(outcome, counts=outcome.counts | {"pairs": rows.pairs})


if __name__ == "__main__":
    run_worker(train)
