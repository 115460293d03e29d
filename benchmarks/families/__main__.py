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

import torch
import transformers
from benchmarks.families.examine import ROUNDING, Outcome, examine
from benchmarks.results import ROOT, markdown
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from snaketune.models.packing_support import ALTERNATIVES

PAGE = ROOT / "docs/models.md"
SECONDS = 300
HEAD = """# Models

This table shows which causal language models of transformers can be trained on packed rows. A tiny random model of each
family was tested with the package's own functions, in float32 on a CPU, with torch {torch} and transformers {transformers}, by

    make families

- `right`: losses and gradients of packed rows equal those of each sequence run alone (within {rounding:.0e} of the largest).
- `refused`: the run stops before training, with the reason given here ({instead}). Evaluation runs a refused model one sequence
  at a time.
- The fourth column tests a training step, reading a checkpoint into another model, reading a model folder, and resizing the
  vocabulary.

{counts}

{table}
"""
COLUMNS = ("family", "packed sft", "dpo, shared prompts", "step, checkpoint, folder", "reason")


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
    wrong = [found.family for found in outcomes if "WRONG" in (found.sft, found.dpo)]
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
    both = sum(found.sft == found.dpo == "right" for found in made)
    sft_only = sum(found.sft == "right" and found.dpo != "right" for found in made)
    refused = sum(found.sft == "refused" for found in made)
    cells = [(one.family, one.sft, one.dpo, one.trained, _short(one.reason)) for one in made]
    text = HEAD.format(
        torch=version("torch"),
        transformers=version("transformers"),
        rounding=ROUNDING,
        instead=ALTERNATIVES,
        counts=f"{len(outcomes)} families: {both} right in both, {sft_only} right in sft alone, {refused} refused, "
        f"{len(missing)} not examined.",
        table=markdown(COLUMNS, [[cell.replace("|", "/") for cell in row] for row in cells]),
    )
    if missing:
        text += "\nNot examined, because no tiny model could be made from the default config:\n\n" + "".join(missing)
    return text


def _short(reason: str) -> str:
    """Shorten a message by what all rows have in common."""
    for repeated in (f". {ALTERNATIVES}", "not made: "):
        reason = reason.replace(repeated, "")
    return reason.split(" doesn't support packed rows: ")[-1]


if __name__ == "__main__":
    main()
