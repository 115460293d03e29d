"""Peak memory of trainings on this CPU, each in its own process, beside the estimate.

python -m benchmarks.memory [NAME …]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "vocab_size": 8192,
}
TINY_23M = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
LARGE |= {"num_key_value_heads": 4}
# Name → shape; rows and tokens of a micro-batch; what of the training is set.
CASES: dict[str, tuple[dict[str, int], tuple[int, int], dict[str, Any]]] = {
    "7M": (SMALL, (2, 1024), {}),
    "23M": (TINY_23M, (4, 1024), {}),
    "23M, two micro-batches": (TINY_23M, (4, 1024), {"batch_rows": 8}),
    "23M, activations recomputed": (TINY_23M, (4, 1024), {"gradient_checkpointing": True}),
    "23M, adafactor": (TINY_23M, (4, 1024), {"optimizer": "adafactor"}),
    "23M, sgd": (TINY_23M, (4, 1024), {"optimizer": "sgd"}),
    "23M, adamw_8bit": (TINY_23M, (4, 1024), {"optimizer": "adamw_8bit"}),
    "23M, bfloat16": (TINY_23M, (2, 512), {"precision": "bfloat16"}),
    "100M": (LARGE, (1, 1024), {}),
    "100M, two micro-batches": (LARGE, (1, 1024), {"batch_rows": 2}),
    "100M, activations recomputed": (LARGE, (2, 1024), {"gradient_checkpointing": True}),
    "100M, LoRA": (LARGE, (2, 1024), {"lora": True}),
}


def full_rows(folder: Path, rows: int, tokens: int) -> Any:
    """Generate full rows of four documents each, all tokens supervised."""
    import numpy as np
    import pyarrow as pa

    from snaketune.artifacts.manifest import Artifact, describe_files
    from snaketune.packing.reader import PackedRows
    from snaketune.packing.shards import IGNORED, row_batch, schema
    from snaketune.tables import write_table

    ids = np.random.default_rng(0).integers(4, 8000, (rows, tokens), dtype=np.int32)
    labels = ids.copy()
    labels[:, :: tokens // 4] = IGNORED
    lengths = np.full(4 * rows, tokens // 4, np.int32)
    starts = np.arange(rows + 1) * 4
    batch = row_batch(ids, labels, np.full(rows, tokens), starts, lengths, np.zeros_like(lengths))
    (folder / "shards").mkdir()
    write_table(folder / "shards/train-00000.arrow", pa.Table.from_batches([batch], schema(tokens)))
    manifest = {"format_version": "3.0", "row_length": tokens, "records": {}}
    manifest["payload"] = describe_files(folder / "shards")
    return PackedRows(Artifact(folder / "manifest.json", manifest, folder / "shards"), "train")


def measure(name: str) -> dict[str, float]:
    """Train for three steps in this process; return the expected and the peak memory in GB."""
    from tests.training.executed import executed
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    from snaketune.config.training_runs import Lora, Scratch, Training
    from snaketune.models.device_memory import peak_memory
    from snaketune.models.devices import resolve_compute
    from snaketune.stages.cache.work_folders import WorkFolder
    from snaketune.stages.specs import SftSpec
    from snaketune.training.loop import pipeline
    from snaketune.training.loop.sft_trainer import SftTrainer
    from snaketune.training.loop.trainer import PreparedTraining, TrainingRun

    shape, (rows, tokens), settings = CASES[name]
    config = AutoConfig.for_model("llama", **{"vocab_size": 32000, "tie_word_embeddings": True} | shape)
    lora = Lora() if settings.get("lora") else None
    defaults = {"micro_batch_rows": rows, "batch_rows": rows, "learning_rate": 1e-4, "compile": False}
    training = Training(**defaults | {key: value for key, value in settings.items() if key != "lora"})
    base = Scratch(hidden_size=8, intermediate_size=8, layers=1, heads=1)
    spec = SftSpec(base=base, training=training, lora=lora, quantization=None)
    with tempfile.TemporaryDirectory() as folder:
        packed = full_rows(Path(folder), 3 * training.batch_rows, tokens)
        work = WorkFolder(Path(folder) / "work")
        work.start()
        operation = executed(training, checkpoint_steps=10**6, log_steps=1)
        run = TrainingRun(spec=spec, operation=operation, work=work, compute=resolve_compute(training.precision))

        def load(dtype, quantization):
            set_seed(0)
            return AutoModelForCausalLM.from_config(config, dtype=dtype)

        prepared = PreparedTraining(trainer_class=SftTrainer, rows=packed, run=run, load=load, new_config=config)
        expected = pipeline.refuse_unfit_machine(prepared).estimate.expected
        with pipeline.ready_trainer(prepared) as trainer:
            pipeline.fit(trainer)
            return {"expected": expected / 1e9, "peak": peak_memory(run.compute.device) / 1e9}


def main(names: list[str]) -> None:
    """Print a line for each setting."""
    for name in names or CASES:
        code = f"import json; from benchmarks.memory import measure; print(json.dumps(measure({name!r})))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        figures = json.loads(done.stdout.splitlines()[-1])
        error = figures["expected"] / figures["peak"] - 1
        print(f"{name:32} {figures['peak']:6.2f} GB, {figures['expected']:6.2f} expected  {error:+.0%}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
