"""Select pairs, conversations or votes from scored responses: the work of the `select` stage.

Left out are responses without a score, those that were truncated (a model would learn to stop there, or not to), and of equal
responses to a prompt all but the first. Of the others, in the order of their scores:

    pairs   the best with the worst, then the second best with the second worst, up to `per_prompt`, as long as their scores
            differ by `margin` at least, and differ at all
    rows    the best, or all, whose score is `at_least`
    votes   good from `good_from`, bad up to `bad_to`; others are left out

Among equal scores, the shorter response is the better one to choose. The rejected one is that whose length is nearest to the
chosen one's, so that length doesn't separate responses that scores don't separate.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.sampling.tables import KEYS, PROMPTS, RESPONSES, SCORES, SELECTED
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import SelectSpec
from snaketune.tables import read_table

Row = dict[str, Any]
# Bins of the share of the best score that a prompt's responses reach on average.
BINS = 10


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A response that can be selected: its turn, its length in tokens and its score."""

    turn: Row
    length: int
    score: float
    index: int


def build(spec: SelectSpec, work: WorkFolder, *, samples: Artifact, scores: Artifact, operation: Execution) -> Outcome:
    """Write `selected.jsonl` to `work.payload`.

    Args:
        operation: with the model whose responses they are, such as `dpo:demo`.
    Raises:
        SnaketuneError: nothing is selected, or less than the spec wants.
    """
    responses, scored = read_table(samples.file(RESPONSES)), read_table(scores.file(SCORES))
    if scored.select(KEYS) != responses.select(KEYS):
        raise SnaketuneError("the scores are of another sample than the responses; run both again")
    of_prompt: dict[tuple[str, int], list[Row]] = {}
    for response, score in zip(responses.to_pylist(), scored["score"].to_pylist(), strict=True):
        of_prompt.setdefault((response["id"], response["turn"]), []).append(response | {"score": score})
    left_out: Counter[str] = Counter()
    prompts_without: Counter[str] = Counter()
    lengths: dict[str, list[int]] = {}
    made = 0
    with (work.payload / SELECTED).open("w", encoding="utf-8") as file:
        for prompt in read_table(samples.file(PROMPTS)).to_pylist():
            candidates = _candidates(of_prompt[prompt["id"], prompt["turn"]], left_out)
            selected = list(_select(spec, candidates))
            if not selected:
                prompts_without[_reason(spec, candidates)] += 1
            for parts in selected:
                file.write(json.dumps(_row(spec, prompt, parts), ensure_ascii=False, sort_keys=True) + "\n")
                made += 1
                for name, candidate in parts.items():
                    lengths.setdefault(name, []).append(candidate.length)
    why = ", ".join(f"{reason}: {count}" for reason, count in prompts_without.most_common())
    if not made:
        raise SnaketuneError(f"no prompt gives a row ({why}); {_advice(spec)}")
    if made < (spec.min_rows or 0):
        raise SnaketuneError(
            f"{len(of_prompt)} prompts give {made} rows, fewer than min_rows: {spec.min_rows} (prompts without: {why}). The "
            f"last model is {operation.sampled}, which was sampled: to end with it, set rounds to those before; or "
            f"{_advice(spec)}"
        )
    counts = {
        "prompts": len(of_prompt),
        "rows": made,
        "prompts_without": dict(sorted(prompts_without.items())),
        "left_out": dict(sorted(left_out.items())),
    }
    means = {name: round(sum(values) / len(values), 2) for name, values in sorted(lengths.items())}
    return Outcome(counts=counts, about={"mean_tokens": means, "solved": _solved(of_prompt)})


def _candidates(responses: list[Row], left_out: Counter[str]) -> list[Candidate]:
    found: dict[str, Candidate] = {}
    for response in responses:
        turn = _turn(response)
        if response["score"] is None:
            left_out["without score"] += 1
        elif response["ended"] != "stop":
            left_out["truncated"] += 1
        elif not turn["content"].strip():
            left_out["empty"] += 1
        elif turn["content"] in found:
            left_out["equal text"] += 1
        else:
            length = len(response["tokens"])
            candidate = Candidate(turn=turn, length=length, score=response["score"], index=response["index"])
            found[turn["content"]] = candidate
    return list(found.values())


def _select(spec: SelectSpec, candidates: list[Candidate]) -> Iterator[dict[str, Candidate]]:
    """Yield what makes a row: a chosen and a rejected response, or one with its label."""
    best_first = sorted(candidates, key=lambda one: (-one.score, one.length, one.index))
    match spec.kind:
        case "preferences":
            for _ in range(spec.per_prompt):
                if len(best_first) < 2:
                    return
                chosen = best_first.pop(0)
                lowest = min(one.score for one in best_first)
                worst = [one for one in best_first if one.score == lowest]
                rejected = min(worst, key=lambda one: (abs(one.length - chosen.length), one.index))
                if chosen.score - rejected.score < spec.margin or chosen.score == rejected.score:
                    return
                best_first.remove(rejected)
                yield {"chosen": chosen, "rejected": rejected}
        case "conversations":
            good = [one for one in best_first if spec.at_least is None or one.score >= spec.at_least]
            yield from ({"response": one} for one in (good if spec.rows == "all" else good[:1]))
        case _:
            assert spec.good_from is not None and spec.bad_to is not None
            for one in sorted(candidates, key=lambda one: one.index):
                if one.score >= spec.good_from:
                    yield {"good": one}
                elif one.score <= spec.bad_to:
                    yield {"bad": one}


def _reason(spec: SelectSpec, candidates: list[Candidate]) -> str:
    """Why a prompt gives no row."""
    if not candidates:
        return "no response left"
    scores = {one.score for one in candidates}
    if spec.kind == "preferences":
        if len(candidates) == 1:
            return "one response left"
        return "equal scores" if len(scores) == 1 else "below margin"
    return "below at_least" if spec.kind == "conversations" else "between bad_to and good_from"


def _advice(spec: SelectSpec) -> str:
    more = "sample more responses, or at a higher temperature"
    keys = {"preferences": "margin", "conversations": "at_least", "unpaired": "good_from or raise bad_to"}
    return f"{more}; or lower {keys[spec.kind]}"


def _row(spec: SelectSpec, prompt: Row, parts: dict[str, Candidate]) -> Row:
    """A row in the layout of the corpus' kind."""
    known = {key: prompt[key] for key in ("answer", "task") if prompt[key] is not None}
    known |= {key: json.loads(prompt[key]) for key in ("tools", "template_variables") if prompt[key]}
    messages = prompt["messages"]
    match spec.kind:
        case "preferences":
            # Read as ratings, whose difference is the pair's margin.
            ratings = {f"score_{name}": one.score for name, one in parts.items()}
            return known | {"prompt": messages} | {name: [one.turn] for name, one in parts.items()} | ratings
        case "conversations":
            return known | {"messages": [*messages, parts["response"].turn]}
        case _:
            ((label, one),) = parts.items()
            return known | {"prompt": messages, "completion": [one.turn], "label": label == "good"}


def _turn(response: Row) -> Row:
    """The response as a turn of a row: reasoning and tool calls in the form that rows have them in."""
    content = response["content"]
    if response["reasoning"] is not None:
        content = f"<think>\n{response['reasoning']}\n</think>\n\n{content}"
    for call in json.loads(response["tool_calls"] or "[]"):
        content += ("\n" if content and not content.endswith("\n") else "") + (
            f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
        )
    return {"role": "assistant", "content": content}


def _solved(of_prompt: dict[tuple[str, int], list[Row]]) -> dict[str, Any]:
    """How the prompts are distributed over the mean score of their responses, between the lowest and the highest score of all:
    the number of prompts in each of BINS bins."""
    known = [[row["score"] for row in rows if row["score"] is not None] for rows in of_prompt.values()]
    means = [sum(scores) / len(scores) for scores in known if scores]
    low, high = (bound(score for scores in known for score in scores) for bound in (min, max))
    bins = [0] * BINS
    for mean in means if high > low else ():
        bins[min(BINS - 1, int(BINS * (mean - low) / (high - low)))] += 1
    return {"low": low, "high": high, "prompts": bins}
