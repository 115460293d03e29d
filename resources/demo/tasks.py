"""The twelve kinds of requests of the demonstration data, each with its right answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import NamedTuple

NAMES = ["Chloé", "Goran", "Inés", "José", "Mia", "Zoë"]
CITIES = ["Bogotá", "Delhi", "Kyiv", "Oslo", "Rome", "Zürich"]
FOREIGN_CITIES = ["東京", "Москва"]
ITEMS = ["apple", "corn", "fig", "kiwi", "lemon", "olive", "plum", "rice"]
COLOURS = ["black", "blue", "crème", "green", "red", "white"]
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


class Step(NamedTuple):
    """One user request and its right answer."""

    request: str
    answer: str


def spell(number: int) -> str:
    """Write a number from 0 to 99 in English words."""
    if number < 20:
        return UNITS[number]
    tens = TENS[number - number % 10]
    return tens if number % 10 == 0 else f"{tens}-{UNITS[number % 10]}"


# One function per task. Each returns a request that stands alone and a second one that follows from it.


def addition(rng: random.Random) -> list[Step]:
    a, b, c, d = (rng.randint(1, 5) for _ in range(4))
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    request = rng.choice([
        f"Work out {a} + {b} for me.",
        f"Add {a} and {b} please.",
        f"{name} has {a} of {item} and gets {b} more. How many in all?",
    ])  # fmt: skip
    return [Step(request, str(a + b)), Step(f"And {c} + {d} then?", str(c + d))]


def subtraction(rng: random.Random) -> list[Step]:
    (b, a), (d, c) = (sorted(rng.sample(range(1, 8), 2)) for _ in range(2))
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    request = rng.choice([
        f"Work out {a} - {b} for me.",
        f"From {a} take {b} away.",
        f"{name} had {a} of {item} and sold {b} of them. How many are left?",
    ])  # fmt: skip
    return [Step(request, str(a - b)), Step(f"And {c} - {d} then?", str(c - d))]


def largest(rng: random.Random) -> list[Step]:
    numbers = rng.sample(range(1, 10), 3)
    text = " ".join(map(str, numbers))
    request = rng.choice([
        f"Of {text} which is the largest?",
        f"Give the maximum of {text} please.",
        f"The scores are {text} today. What is the top score?",
    ])  # fmt: skip
    return [Step(request, str(max(numbers))), Step("And the smallest of them?", str(min(numbers)))]


def sorting(rng: random.Random) -> list[Step]:
    numbers = rng.sample(range(1, 7), 3)
    text = " ".join(map(str, numbers))
    up, down = (" ".join(map(str, sorted(numbers, reverse=r))) for r in (False, True))
    if rng.random() < 0.5:
        request = rng.choice([f"Sort from low to high: {text}", f"Put in rising order: {text}"])
        return [Step(request, up), Step("Now from high to low.", down)]
    request = rng.choice([f"Sort from high to low: {text}", f"Put in falling order: {text}"])
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
    table = ", ".join(f"{field} = {record[field]}" for field in fields)
    one, two = rng.sample(fields, 2)
    request = rng.choice([f"The record says {table}. What is the {one}?", f"Find the {one} in this record: {table}"])
    return [Step(request, record[one]), Step(f"And the {two}?", record[two])]


def uppercase(rng: random.Random) -> list[Step]:
    one, two = rng.choice(COLOURS), rng.choice(ITEMS)
    request = rng.choice([
        f"Write in capitals: {one} {two}",
        f"Turn into upper case: {one} {two}",
        f"A label in capital letters, please: {one} {two}",
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
    name, city, colour = rng.choice(NAMES), rng.choice(CITIES), rng.choice(COLOURS)
    request = rng.choice([
        f"Make a JSON object: name {name}, city {city}",
        f"{name} lives in {city}. Write name and city as JSON.",
        f"As JSON with the keys name and city: {name}, {city}",
    ])  # fmt: skip
    return [
        Step(request, json.dumps({"name": name, "city": city}, ensure_ascii=False)),
        Step(f"Now name and colour, {colour}.", json.dumps({"name": name, "colour": colour}, ensure_ascii=False)),
    ]


def iso_date(rng: random.Random) -> list[Step]:
    year, month, day = rng.randint(2026, 2027), rng.randint(1, 12), rng.randint(1, 12)
    request = rng.choice([
        f"Write {day} {MONTHS[month - 1]} {year} as an ISO date.",
        f"Turn {day} {MONTHS[month - 1]} {year} into an ISO date.",
        f"Rewrite the date {day} {MONTHS[month - 1]} {year} as YYYY-MM-DD.",
    ])  # fmt: skip
    return [
        Step(request, f"{year}-{month:02d}-{day:02d}"),
        Step("Only the month and the day.", f"{month:02d}-{day:02d}"),
    ]


def weekday(rng: random.Random) -> list[Step]:
    start, distance = rng.randrange(7), rng.randint(1, 2)
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
        f"How is {one} spelled?",
        f"Spell out {one} for a cheque.",
    ])  # fmt: skip
    return [Step(request, spell(one)), Step(f"And {two} then?", spell(two))]


TASKS: list[Callable[[random.Random], list[Step]]] = [
    addition, subtraction, largest, sorting, counting, lookup, uppercase, csv_to_table, json_record,
    iso_date, weekday, number_words,
]  # fmt: skip

# What is copied from a request takes longest to learn, so it comes twice as often.
WEIGHTS = [2 if task in (lookup, csv_to_table, json_record, iso_date) else 1 for task in TASKS]
