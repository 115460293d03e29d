"""Whole trainings of tiny reward models in this process, on pairs packed as trees."""

from pathlib import Path
from typing import Any

from snaketune.config.lora import Lora
from snaketune.config.training_runs import Training
from snaketune.engine.model.devices import Compute
from snaketune.models.adapter_stack import AdapterStack
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import RewardSpec
from snaketune.training import pipeline
from snaketune.training.prepared import PreparedTraining, TrainingRun
from snaketune.training.prepared_reward import reward_training
from tests.models.conftest import CPU, tiny_model

from .executed import executed
from .preference_runs import Start, packed_pairs


class TrainedRewards:
    """Initial weights and pairs; runs any number of trainings on them."""

    def __init__(self, folder: Path, rows: int = 12, family: str = "llama", compute: Compute = CPU):
        self.folder, self.compute = folder, compute
        self.packed = packed_pairs(folder / "pairs", rows)
        tiny_model(family).save_pretrained(folder / "model")

    def prepared(
        self,
        name: str,
        *,
        every: int = 100,
        lora: Lora | None = None,
        loss: dict[str, Any] | None = None,
        evaluate: Any = False,
        launch: dict[str, Any] | None = None,
        **training: Any,
    ) -> PreparedTraining:
        """Args: every: steps between checkpoints; loss: keys of the loss; training: its settings."""
        settings = {"epochs": 3, "batch_rows": 4, "micro_batch_rows": 4, "learning_rate": 0.01, "seed": 1} | training
        spec = RewardSpec(
            training=Training(**settings), lora=lora, quantization=None, trust_remote_code=False, **(loss or {})
        )
        work = WorkFolder(self.folder / name)
        work.start()
        operation = executed(spec.training, log_steps=1, checkpoint_steps=every, evaluate=evaluate, **(launch or {}))
        run = TrainingRun(spec=spec, operation=operation, work=work, compute=self.compute)
        initial = AdapterStack(results=(Start(self.folder / "model"),), tokenizer=self.folder / "model")
        return reward_training(run, initial, self.packed, held_out=False)

    def train(self, name: str, **settings: Any) -> tuple[Outcome, WorkFolder]:
        prepared = self.prepared(name, **settings)
        return pipeline.train(prepared), prepared.run.work
