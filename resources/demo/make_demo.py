"""Write the demonstration data: chat.jsonl (for SFT) and preferences.jsonl (for DPO), the same bytes every time.

Each conversation asks for small, checkable work: sums, sorting, counting, looking a value up, or rewriting
something in another format. The reply holds its result on one line, `Answer: <result>`, and the row's `answer`
field repeats that result, so that a program can mark a model's reply. Operands and lists are small and words come
from short lists, so that a model of about a million weights, trained from nothing, learns the tasks in minutes.

chat.jsonl         {"messages", "task", "answer"}. Half of the users write plainly and half warmly ("Hi there!").
                   The assistant mostly returns the tone: only the answer line for the one, pleasantries around
                   that line for the other. The tone is drawn without regard to the task.
preferences.jsonl  {"prompt", "chosen", "rejected", "task", "answer"}. One habit to learn: whatever the user's tone,
                   reply with the answer line alone. The rejected reply has the same right answer, with pleasantries.

No two rows of the two files together share their system prompt and first user turn.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import NamedTuple

from tasks import TASKS, WEIGHTS

SEED = 20240917
CHAT_ROWS = 9000
PREFERENCE_ROWS = 1600
MULTI_TURN_SHARE = 0.25
SYSTEM_SHARE = 0.15
# How often the assistant returns the user's tone. Below 1, so that the SFT model also knows the tone that DPO teaches.
TONE_MATCH = 0.9

SYSTEM_PROMPTS = [
    "Write each result after Answer:",
    "You help with small office jobs.",
    "You are the help desk of a small shop.",
    "You check homework for a primary school.",
]

# Names of senders don't occur in tasks, so that a name in a greeting is never an answer.
SENDERS = ["Aïcha", "Boris", "Dana", "Finn", "Olga", "Tom"]
PLACES = ["Bern", "Cairo", "Hanoi", "Tunis"]
WARM_OPENERS = [
    "Hi there!", "Hello!", "Good morning!", "Hi, {name} here!", "Hello, I am {name}!", "Hey! {name} again!", "¡Hola!",
    "Greetings from {city}!", "Hi from sunny {city}!", "こんにちは!", "Привет!", "नमस्ते!",
]  # fmt: skip
WARM_CLOSERS = ["", "", "Thank you!", "Many thanks!", "Merci!", "Cheers, {name}!"]
PLAIN_OPENERS = ["", "", "Question:", "Task:", "For {name}:", "{city} office:", "Ticket from {name}:", "{city} again:"]
PLAIN_CLOSERS = ["", "", "", "Result only.", "One line.", "Needed by {name}."]

CHATTY_BEFORE = ["Sure, happy to help!", "Of course!", "With pleasure!", "No problem at all!"]
CHATTY_AFTER = ["I hope that helps!", "Have a lovely day!", "Always glad to help!", "See you soon!"]

Message = dict[str, str]


class Draft(NamedTuple):
    """One conversation without its last reply."""

    task: str
    prompt: list[Message]
    answer: str
    warm: bool


def brief_reply(answer: str) -> str:
    return f"Answer: {answer}"


def chatty_reply(rng: random.Random, answer: str) -> str:
    """The answer line with a pleasantry before it, after it, or both."""
    where = rng.choice(["before", "after", "both", "both"])
    lines = [f"Answer: {answer}"]
    if where != "after":
        lines.insert(0, rng.choice(CHATTY_BEFORE))
    if where != "before":
        lines.append(rng.choice(CHATTY_AFTER))
    return "\n".join(lines)


def toned_reply(rng: random.Random, answer: str, warm: bool) -> str:
    """A reply that mostly returns the user's tone."""
    chatty = warm == (rng.random() < TONE_MATCH)
    return chatty_reply(rng, answer) if chatty else brief_reply(answer)


def dress(rng: random.Random, request: str, warm: bool) -> str:
    """Put a greeting or a heading before a request, and a remark after it."""
    opener = rng.choice(WARM_OPENERS if warm else PLAIN_OPENERS)
    closer = rng.choice(WARM_CLOSERS if warm else PLAIN_CLOSERS)
    opener, closer = (part.format(name=rng.choice(SENDERS), city=rng.choice(PLACES)) for part in (opener, closer))
    gap = "\n" if "\n" in request or request[-1] not in ".?!" else " "
    text = f"{opener} {request}" if opener else request
    return f"{text}{gap}{closer}" if closer else text


def make_draft(rng: random.Random, seen: set[tuple[str, str]]) -> Draft:
    """Draw conversations until one has a system prompt and first request that were not seen before."""
    (task,) = rng.choices(TASKS, WEIGHTS)
    while True:
        warm = rng.random() < 0.5
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < SYSTEM_SHARE else ""
        first, second = task(rng)
        opening = dress(rng, first.request, warm)
        if (system, opening) not in seen:
            break
    seen.add((system, opening))
    prompt = [{"role": "system", "content": system}] if system else []
    prompt.append({"role": "user", "content": opening})
    if rng.random() >= MULTI_TURN_SHARE:
        return Draft(task.__name__, prompt, first.answer, warm)
    prompt.append({"role": "assistant", "content": toned_reply(rng, first.answer, warm)})
    prompt.append({"role": "user", "content": second.request})
    return Draft(task.__name__, prompt, second.answer, warm)


def chat_row(rng: random.Random, seen: set[tuple[str, str]]) -> dict[str, object]:
    draft = make_draft(rng, seen)
    reply = toned_reply(rng, draft.answer, draft.warm)
    messages = [*draft.prompt, {"role": "assistant", "content": reply}]
    return {"messages": messages, "task": draft.task, "answer": draft.answer}


def preference_row(rng: random.Random, seen: set[tuple[str, str]]) -> dict[str, object]:
    draft = make_draft(rng, seen)
    return {
        "prompt": draft.prompt,
        "chosen": [{"role": "assistant", "content": brief_reply(draft.answer)}],
        "rejected": [{"role": "assistant", "content": chatty_reply(rng, draft.answer)}],
        "task": draft.task,
        "answer": draft.answer,
    }


def make_files() -> dict[str, bytes]:
    """Return the content of each file by its name."""
    rng = random.Random(SEED)
    seen: set[tuple[str, str]] = set()
    rows = {
        "chat.jsonl": [chat_row(rng, seen) for _ in range(CHAT_ROWS)],
        "preferences.jsonl": [preference_row(rng, seen) for _ in range(PREFERENCE_ROWS)],
    }
    return {
        name: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part).encode("utf-8")
        for name, part in rows.items()
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the demonstration data, or check that it is as written.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, help="folder of the files")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs")
    options = parser.parse_args(arguments)
    files = make_files()
    if not options.check:
        options.out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (options.out / name).write_bytes(content)
        return 0
    failed = False
    for name, content in files.items():
        path = options.out / name
        if not path.is_file():
            print(f"{path} is missing", file=sys.stderr)
            failed = True
        elif path.read_bytes() != content:
            print(f"{path} differs from what make_demo.py writes", file=sys.stderr)
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
