"""Peak memory of trainings on this CPU, each in its own process, beside the estimate.

python -m benchmarks.memory [NAME …]
"""

import json
import subprocess
import sys
import tempfile
from typing import Any

TINY_23M = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8}
LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
LARGE |= {"num_key_value_heads": 4}
# Name → shape; rows and tokens of a micro-batch; what of the training is set.
CASES: dict[str, tuple[dict[str, int], tuple[int, int], dict[str, Any]]] = {
    "7M": (SMALL | {"vocab_size": 8192}, (2, 1024), {}),
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


def measure(name: str) -> dict[str, float]:
    """Train for three steps on full rows of four documents each; return the expected and the peak memory in GB."""
    import numpy as np
    from tests.training.executed import executed, made_by
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    from benchmarks.gpu.rows import MadeRows
    from benchmarks.jobs import started
    from snaketune.config.base_models import Scratch
    from snaketune.config.lora import Lora
    from snaketune.config.training_runs import Training
    from snaketune.models.devices import resolve_compute
    from snaketune.models.machine import peak_memory
    from snaketune.stages.specs import SftSpec
    from snaketune.training.loop import pipeline
    from snaketune.training.loop.sft_trainer import SftTrainer
    from snaketune.training.loop.trainer import PreparedTraining, TrainingRun

    shape, (micro_rows, tokens), settings = CASES[name]
    config = AutoConfig.for_model("llama", **{"vocab_size": 32000, "tie_word_embeddings": True} | shape)
    defaults = {"micro_batch_rows": micro_rows, "batch_rows": micro_rows, "learning_rate": 1e-4, "compile": False}
    lora = Lora() if settings.get("lora") else None
    training = Training(**defaults | {key: value for key, value in settings.items() if key != "lora"})
    base = Scratch(hidden_size=8, intermediate_size=8, layers=1, heads=1)
    spec = SftSpec(base=base, training=training, lora=lora, quantization=None)
    documents = np.random.default_rng(0).integers(4, 8000, (3 * training.batch_rows, 4, tokens // 4), dtype=np.int32)
    lengths = [np.full(4, tokens // 4) for _ in documents]
    columns = {"segment_lengths": lengths, "prefix_lengths": [np.zeros_like(some) for some in lengths]}
    rows = MadeRows([[(document, 1) for document in row] for row in documents], tokens, **columns)

    def load(dtype, quantization):
        set_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)

    with tempfile.TemporaryDirectory() as folder:
        operation = executed(training, checkpoint_steps=10**6, log_steps=1)
        run = TrainingRun(
            spec=spec, operation=operation, work=started(folder), compute=resolve_compute(training.precision)
        )
        initial = made_by(load, new_config=config)
        prepared = PreparedTraining(trainer_class=SftTrainer, rows=rows, run=run, initial=initial)
        expected = pipeline.refuse_unfit_machine(prepared).estimate.expected
        with pipeline.ready_trainer(prepared) as trainer:
            pipeline.fit(trainer)
            return {"expected": expected / 1e9, "peak": peak_memory(run.compute.device) / 1e9}


def main(names: list[str]) -> None:
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
