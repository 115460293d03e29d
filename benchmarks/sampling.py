"""Several responses per prompt: the engine `transformers` beside `generate(num_return_sequences=8)` of the same model.

    make real && PYTHONPATH=workflow:. OMP_NUM_THREADS=1 python -m benchmarks.sampling data/smollm2-135m

Both generate 8 responses of 64 tokens to prompts of 512 in one batch per prompt, on one thread, interleaved; medians. Ours
computes a prompt once, transformers once per response.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from snaketune.config.generation import Decoding
from snaketune.engine.model.devices import resolve_compute
from snaketune.sampling.generation_check import MODES
from snaketune.sampling.responses import Request
from snaketune.sampling.transformers_engine import TransformersEngine

PROMPT, RESPONSE, RESPONSES = 512, 64, 8


class NeverStops:
    """The part of a tokenizer that generation needs; no token stops a response, so that both sides generate as many."""

    pad_id, stop_ids = 0, (10**9,)

    def decode(self, ids) -> str:
        return " ".join(map(str, ids))


def measure(generate: Callable[[np.ndarray], int], prompt: np.ndarray) -> float:
    """Tokens per second of the responses to a prompt."""
    started = time.perf_counter()
    tokens = generate(prompt)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert tokens == RESPONSES * RESPONSE, f"{tokens} tokens"
    return tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a folder with a model, or an id of the Hub")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    compute = resolve_compute("auto")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=compute.dtype).to(compute.device)
    decoding = Decoding(max_new_tokens=RESPONSE, temperature=1.0)
    engine = TransformersEngine(model=model, chat=NeverStops(), compute=compute, mode=MODES[0], decoding=decoding)
    plain = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=RESPONSE,
        num_return_sequences=RESPONSES,
        eos_token_id=10**9,
        pad_token_id=0,
    )

    def ours(prompt: np.ndarray) -> int:
        batch = [Request(prompt, index) for index in range(RESPONSES)]
        return sum(len(response.tokens) for found in engine.generate([batch]) for response in found.values())

    def theirs(prompt: np.ndarray) -> int:
        ids = torch.from_numpy(prompt.astype(np.int64))[None].to(compute.device)
        model.generation_config = plain
        with torch.no_grad(), compute.autocast():
            out = model.generate(ids, attention_mask=torch.ones_like(ids))
        return out[:, PROMPT:].numel()

    generator = np.random.default_rng(0)
    rates: dict[str, list[float]] = {"snaketune": [], "transformers": []}
    for number in range(arguments.rounds + 1):
        prompt = generator.integers(100, model.config.vocab_size - 100, PROMPT).astype(np.int32)
        measured = {"snaketune": measure(ours, prompt), "transformers": measure(theirs, prompt)}
        print(
            f"round {number}: " + ", ".join(f"{name} {rate:.1f} tokens/s" for name, rate in measured.items()),
            flush=True,
        )
        # The first round warms up.
        for name, rate in measured.items() if number else ():
            rates[name].append(rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["snaketune"] / medians["transformers"]
    print(f"{medians['snaketune']:.1f} against {medians['transformers']:.1f} tokens/s: {ratio:.2f} times as fast")


if __name__ == "__main__":
    main()
