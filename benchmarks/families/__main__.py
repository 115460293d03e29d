"""Every causal language model of the installed transformers in the packed engine, and the table of the outcomes.

    python -m benchmarks.families                  all of them, in ten minutes on two cores; writes docs/models.md
    python -m benchmarks.families llama mamba      some, and nothing is written

Each family is a tiny random model in a process of its own: made from its default config, shrunk. Packed losses and gradients
are held against every sequence run alone, unless the package refuses the family first.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import queue
import sys
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from benchmarks.families.examine import Outcome, examine
from benchmarks.families.table import as_markdown
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TABLE = Path(__file__).parents[2] / "docs/models.md"
SECONDS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*")
    chosen = parser.parse_args().families
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    outcomes = []
    with ThreadPoolExecutor(os.cpu_count()) as several:
        for found in several.map(_in_process, chosen or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
            outcomes.append(found)
            print(json.dumps(dataclasses.asdict(found)), flush=True)
    wrong = [found.family for found in outcomes if "WRONG" in (found.sft, found.dpo)]
    if not chosen:
        versions = {name: version(name) for name in ("torch", "transformers")}
        TABLE.write_text(as_markdown(outcomes, versions), encoding="utf-8")
    sys.exit(f"silently wrong: {', '.join(wrong)}" if wrong else 0)


def _in_process(family: str) -> Outcome:
    """Examine a family in a forked process, so that a crash is an outcome too; the imports are done before the fork."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=_answer, args=(family, answers))
    process.start()
    try:
        return answers.get(timeout=SECONDS)
    except queue.Empty:
        return Outcome(family, reason=f"not made: no answer within {SECONDS} s")
    finally:
        process.kill()
        process.join()


def _answer(family: str, answers) -> None:
    try:
        found = examine(family)
    except Exception as error:
        print("".join(traceback.format_exception(error)[-2:]), file=sys.stderr)
        first_line = (str(error).strip().splitlines() or [""])[0]
        found = Outcome(family, reason=f"not made: {type(error).__name__}: {first_line}")
    answers.put(found)


if __name__ == "__main__":
    main()
