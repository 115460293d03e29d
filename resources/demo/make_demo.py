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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SEED = 20240917
CHAT_ROWS = 7000
PREFERENCE_ROWS = 1600
MULTI_TURN_SHARE = 0.15
SYSTEM_SHARE = 0.25
TONE_MATCH = 0.94  # how often the assistant returns the user's tone

NAMES = ["Ana", "Björn", "Chloé", "Elif", "Goran", "Inés", "José", "Łukasz", "Mia", "Noël", "Søren", "Zoë"]
CITIES = ["Accra", "Bogotá", "Delhi", "Kyiv", "Lima", "Málaga", "Oslo", "Quito", "Rome", "Zürich"]
FOREIGN_CITIES = ["東京", "Москва", "Αθήνα", "서울", "القاهرة", "תל אביב"]
ITEMS = ["apple", "bean", "corn", "fig", "kiwi", "lemon", "mango", "olive", "peach", "plum", "rice", "salt"]
COLOURS = ["black", "blue", "crème", "green", "pink", "red", "white", "yellow"]
MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
]  # fmt: skip
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
UNITS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = {20: "twenty", 30: "thirty", 40: "forty", 50: "fifty", 60: "sixty", 70: "seventy", 80: "eighty", 90: "ninety"}

SYSTEM_PROMPTS = [
    "You are a careful assistant. Put the result on a line that starts with Answer:",
    "Solve the task and give the result after Answer:",
    "You help with small office jobs. Write each result as Answer: and the value.",
    "State the result on one line, as Answer: X.",
    "You are the help desk of a small shop.",
    "You check homework for a primary school.",
]

WARM_OPENERS = [
    "Hi there!", "Hello!", "Hey, good morning!", "Hi, {name} here!", "Good evening!", "Hello, I am {name}!",
    "Hey! {name} again!", "Hi! A small favour for {name}!", "¡Hola!", "Ça va?", "Greetings from {city}!",
    "Hi from sunny {city}!", "こんにちは!", "Привет!", "नमस्ते!",
]  # fmt: skip
WARM_CLOSERS = ["", "", "Thanks a lot!", "Thank you!", "Many thanks!", "Merci!", "You are the best!", "Cheers, {name}!"]
PLAIN_OPENERS = [
    "", "", "", "Question:", "Task:", "Next one.", "For {name}:", "Ticket for {name}.", "{city} office:",
    "Case {number}.", "Row {number}.", "No. {number} →",
]  # fmt: skip
PLAIN_CLOSERS = ["", "", "", "Result only.", "One line.", "Needed by {name}."]

CHATTY_BEFORE = [
    "Sure, happy to help!", "Of course!", "What a nice question!", "Good to hear from you!", "Let me see...",
    "Great, let us look at this together.", "With pleasure!", "No problem at all!", "Thanks for asking!",
    "Certainly! Here it comes.",
]  # fmt: skip
CHATTY_AFTER = [
    "Let me know if you need anything else!", "I hope that helps!", "Have a lovely day!",
    "Feel free to ask me more.", "That was fun, thank you!", "Always glad to help!", "Enjoy the rest of your day!",
    "Just ask if something is unclear.", "Good luck with it!", "See you soon!",
]  # fmt: skip

Message = dict[str, str]


class Step(NamedTuple):
    """One user request and its right answer."""

    request: str
    answer: str


class Draft(NamedTuple):
    """One conversation without its last reply."""

    task: str
    prompt: list[Message]
    answer: str
    warm: bool


def spell(number: int) -> str:
    """Write a number from 0 to 99 in English words."""
    if number < 20:
        return UNITS[number]
    tens = TENS[number - number % 10]
    return tens if number % 10 == 0 else f"{tens}-{UNITS[number % 10]}"


# One function per task. Each returns a request that stands alone and a second one that follows from it.


def addition(rng: random.Random) -> list[Step]:
    a, b, c, d = (rng.randint(1, 6) for _ in range(4))
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    request = rng.choice([
        f"What is {a} + {b}?",
        f"Add {a} and {b}.",
        f"{name} has {a} of {item} and gets {b} more. How many in all?",
        f"{a} boxes of {item} came today and {b} yesterday. How many in total?",
    ])  # fmt: skip
    return [Step(request, str(a + b)), Step(f"And what is {c} + {d}?", str(c + d))]


def subtraction(rng: random.Random) -> list[Step]:
    (b, a), (d, c) = (sorted(rng.sample(range(1, 10), 2)) for _ in range(2))
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    request = rng.choice([
        f"What is {a} - {b}?",
        f"Take {b} away from {a}.",
        f"{name} had {a} of {item} and sold {b}. How many are left?",
        f"{b} of the {a} boxes of {item} are gone. How many are left?",
    ])  # fmt: skip
    return [Step(request, str(a - b)), Step(f"And what is {c} - {d}?", str(c - d))]


def largest(rng: random.Random) -> list[Step]:
    numbers = rng.sample(range(1, 10), 3)
    text = ", ".join(map(str, numbers))
    request = rng.choice([
        f"Which number is the largest: {text}?",
        f"Give the maximum of {text}.",
        f"Scores: {text}. What is the top score?",
    ])  # fmt: skip
    return [Step(request, str(max(numbers))), Step("And the smallest of them?", str(min(numbers)))]


def sorting(rng: random.Random) -> list[Step]:
    numbers = rng.sample(range(1, 10), 3)
    text = ", ".join(map(str, numbers))
    up, down = (", ".join(map(str, sorted(numbers, reverse=r))) for r in (False, True))
    if rng.random() < 0.5:
        request = rng.choice([f"Sort from low to high: {text}", f"Put {text} in rising order."])
        return [Step(request, up), Step("Now from high to low.", down)]
    request = rng.choice([f"Sort from high to low: {text}", f"Put {text} in falling order."])
    return [Step(request, down), Step("Now from low to high.", up)]


def counting(rng: random.Random) -> list[Step]:
    words = rng.sample(rng.choice([ITEMS, COLOURS]), rng.randint(2, 5))
    text = ", ".join(words)
    request = rng.choice([
        f"How many entries are in this list: {text}?",
        f"Count the words: {text}",
        f"On my list: {text}. How many things is that?",
    ])  # fmt: skip
    return [Step(request, str(len(words))), Step("And if I add one more?", str(len(words) + 1))]


def lookup(rng: random.Random) -> list[Step]:
    record = {
        "name": rng.choice(NAMES),
        "city": rng.choice(CITIES + FOREIGN_CITIES),
        "item": rng.choice(ITEMS),
        "colour": rng.choice(COLOURS),
    }
    fields = rng.sample(sorted(record), 3)
    layout = rng.choice(["{}: {}", "{} → {}", "{} = {}"])
    table = rng.choice([", ", "\n"]).join(layout.format(field, record[field]) for field in fields)
    one, two = rng.sample(fields, 2)
    request = rng.choice([
        f"{table}\nWhat does the table say for {one}?",
        f"{table}\nFind the {one}.",
        f"Give me the {one} from this record:\n{table}",
    ])  # fmt: skip
    return [Step(request, record[one]), Step(f"And the {two}?", record[two])]


def uppercase(rng: random.Random) -> list[Step]:
    one, two = rng.choice(COLOURS), rng.choice(ITEMS)
    request = rng.choice([
        f"Write in capitals: {one} {two}",
        f"Turn '{one} {two}' into upper case.",
        f"The label '{one} {two}' should be in capital letters.",
    ])  # fmt: skip
    other = rng.choice(ITEMS)
    return [Step(request, f"{one} {two}".upper()), Step(f"The same for {other}.", other.upper())]


def csv_to_table(rng: random.Random) -> list[Step]:
    words = rng.sample(rng.choice([ITEMS, COLOURS]), 3)
    text = ", ".join(words)
    request = rng.choice([
        f"Turn this CSV row into a table row: {text}",
        f"CSV → table row: {text}",
        f"Put bars instead of commas: {text}",
    ])  # fmt: skip
    return [Step(request, "| " + " | ".join(words) + " |"), Step("Now with arrows.", " → ".join(words))]


def json_record(rng: random.Random) -> list[Step]:
    name, city, age = rng.choice(NAMES), rng.choice(CITIES), rng.randint(20, 69)
    request = rng.choice([
        f"Make a JSON object: name {name}, city {city}",
        f"{name} lives in {city}. Write name and city as JSON.",
        f"As JSON with the keys name and city: {name}, {city}",
    ])  # fmt: skip
    return [
        Step(request, json.dumps({"name": name, "city": city}, ensure_ascii=False)),
        Step(f"Now name and age, {age}.", json.dumps({"name": name, "age": age}, ensure_ascii=False)),
    ]


def iso_date(rng: random.Random) -> list[Step]:
    year, month, day = rng.randint(2020, 2029), rng.randint(1, 12), rng.randint(1, 28)
    request = rng.choice([
        f"Write {day} {MONTHS[month - 1]} {year} as an ISO date.",
        f"ISO date for {day} {MONTHS[month - 1]} {year}?",
        f"Rewrite the date {day} {MONTHS[month - 1]} {year} as YYYY-MM-DD.",
    ])  # fmt: skip
    return [
        Step(request, f"{year}-{month:02d}-{day:02d}"),
        Step("Now with dots, day first.", f"{day:02d}.{month:02d}.{year}"),
    ]


def weekday(rng: random.Random) -> list[Step]:
    start, distance = rng.randrange(7), rng.randint(1, 3)
    days = "day" if distance == 1 else "days"
    request = rng.choice([
        f"Which day is {distance} {days} after {DAYS[start]}?",
        f"It is {DAYS[start]}. Which day is it in {distance} {days}?",
        f"An order of {DAYS[start]} takes {distance} {days}. On which day does it arrive?",
    ])  # fmt: skip
    after = (start + distance) % 7
    return [Step(request, DAYS[after]), Step("And one day later?", DAYS[(after + 1) % 7])]


def number_words(rng: random.Random) -> list[Step]:
    one, two = rng.sample(range(100), 2)
    request = rng.choice([
        f"Write {one} in words.",
        f"How do you spell the number {one}?",
        f"Spell out {one} for a cheque.",
    ])  # fmt: skip
    return [Step(request, spell(one)), Step(f"And {two}?", spell(two))]


TASKS: list[Callable[[random.Random], list[Step]]] = [
    addition, subtraction, largest, sorting, counting, lookup, uppercase, csv_to_table, json_record,
    iso_date, weekday, number_words,
]  # fmt: skip


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
    opener, closer = (
        part.format(name=rng.choice(NAMES), city=rng.choice(CITIES), number=rng.randint(1, 99))
        for part in (opener, closer)
    )
    gap = "\n" if "\n" in request or request[-1] not in ".?!" else " "
    text = f"{opener} {request}" if opener else request
    return f"{text}{gap}{closer}" if closer else text


def make_draft(rng: random.Random, seen: set[tuple[str, str]]) -> Draft:
    """Draw conversations until one has a system prompt and first request that were not seen before."""
    task = rng.choice(TASKS)
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
