"""Every causal language model of the installed transformers in the packed engine, and the table of the outcomes.

    python -m benchmarks.families                  all of them, in ten minutes on two cores; writes docs/models.md
    python -m benchmarks.families llama mamba      some, and nothing is written

Each family is a tiny random model in a process of its own: made from its default config, shrunk. Losses and gradients of packed
rows are compared with those of every sequence run alone.
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
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import torch
import transformers
from benchmarks.families.examine import ROUNDING, Outcome, examine
from benchmarks.results import ROOT, markdown
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from snaketune.engine.model.packing_support import INSTEAD

PAGE = ROOT / "docs/models.md"
SECONDS = 300
PATHS = ("packed", "hybrid", "separate", "refused", "WRONG")
HEAD = """# Models

This table shows how the causal language models of transformers train on packed rows: on documents (`sft`), on pairs with a
shared prompt (`dpo`, and the reference pass), and on pairs with adapters on all linear layers (`lora`). Evaluations compute
documents and pairs in the same way. A tiny random model of each family was tested with the package's own functions, in float32
on a CPU, with torch {torch} and transformers {transformers}, by

    make families

- `packed`: attention over the documents of a row; a shared prompt is computed once.
- `hybrid`: packed, but for the layers that carry a state (linear attention, Mamba, short convolutions). These run on the
  documents, padded on the right, and compute a shared prompt for each completion. On a GPU with the packages of their kernels,
  rows without shared prompts are packed there too ([gpus.md](gpus.md#attention-kernels)).
- `separate`: each document is a sequence of its own, padded on the right; the last column says why. It needs no option.
- `refused`: documents differ beside others even as sequences of their own. The model is an encoder, or its decoder needs an
  encoder's output.
- In each of these, losses and gradients equal those of each sequence run alone, within {rounding:.0e} of the largest.
- `trains and saves`: a training step, a checkpoint read into another model, a model folder, and a larger vocabulary.

{counts}

{table}
"""
COLUMNS = ("family", "sft", "dpo", "lora", "adapters on", "trains and saves", "reason")


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
    if not chosen:
        PAGE.write_text(page(outcomes), encoding="utf-8")
    wrong = [found.family for found in outcomes if "WRONG" in (found.sft, found.dpo, found.lora)]
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


def page(outcomes: list[Outcome]) -> str:
    made = sorted((found for found in outcomes if found.sft), key=lambda found: found.family)
    missing = [f"- {found.family}: {_short(found.reason)}\n" for found in outcomes if not found.sft]
    paths = Counter(found.dpo for found in made)
    cells = [
        (one.family, one.sft, one.dpo, one.lora, " ".join(one.targets), one.trained, _short(one.reason)) for one in made
    ]
    text = HEAD.format(
        torch=version("torch"),
        transformers=version("transformers"),
        rounding=ROUNDING,
        counts=f"{len(outcomes)} families, by pairs: {', '.join(f'{paths[path]} {path}' for path in PATHS if paths[path])}; "
        f"{len(missing)} not examined.",
        table=markdown(COLUMNS, [[cell.replace("|", "/") for cell in row] for row in cells]),
    )
    if missing:
        text += "\nNot examined, because no tiny model could be made from the default config:\n\n" + "".join(missing)
    return text


def _short(reason: str) -> str:
    """Shorten a message by what all rows have in common."""
    for repeated in (f". {INSTEAD}", "not made: "):
        reason = reason.replace(repeated, "")
    return reason.split(" doesn't support packed rows: ")[-1].split(" can't be computed beside other documents: ")[-1]


if __name__ == "__main__":
    main()
