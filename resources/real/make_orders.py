"""Write the rows of config/recipes/smollm2-135m.yaml, the same bytes every time: python resources/real/make_orders.py

They lie below data/orders. A shop receives orders as people write them, and needs them as JSON.

orders.jsonl    {"messages"}, for SFT: an order, and its five details as one line of JSON.
reviews.jsonl   {"prompt", "chosen", "rejected"}, for DPO: the shop prefers days by three letters, `Mon` and not `Monday`.
"""

import json
import random
from pathlib import Path

FOLDER = Path("data/orders")
ORDERS, REVIEWS, SEED = 180, 170, 11
INSTRUCTION = "Write this order as JSON with the keys name, item, quantity, city and day."
NAMES = [
    "Aisha Khan", "Ben Carter", "Chen Wei", "Dana Levi", "Elena Rossi", "Farid Haddad", "Grace Okafor", "Hugo Martin",
    "Ines Silva", "Jonas Berg", "Kofi Mensah", "Lucia Gomez", "Mira Novak", "Nadia Petrova", "Omar Aziz", "Priya Nair",
]  # fmt: skip
ITEMS = [
    "bags of rice", "boxes of tea", "brooms", "candles", "cans of paint", "chairs", "desk lamps", "flower pots",
    "garden hoses", "jars of honey", "notebooks", "pillows", "rolls of tape", "soup bowls", "towels", "wool blankets",
]  # fmt: skip
CITIES = ["Accra", "Bergen", "Cairo", "Dublin", "Graz", "Hanoi", "Lagos", "Lima", "Lyon", "Oslo", "Porto", "Quito"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
WORDS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
NUMBERS = dict(enumerate(WORDS, start=2))
FORMS = [
    "Hi, {name} here! I would like {quantity} {item}. Please send them to {city}. {day} would suit me.",
    "Good morning! We are out of {item} and need {quantity} by {day}. Our shop is in {city}. Best, {name}",
    "Order for {name}: {quantity} {item}, delivery on {day}, to {city}.",
    "Could you bring {quantity} {item} to our house in {city}? Any time on {day}. Thank you, {name}",
    "{name} called. The order is {quantity} {item}. They go to {city}. It has to be there on {day}.",
    "My name is {name}. I live in {city}. I need {item}, {quantity} if you have that many. Please come on {day}.",
]
KEYS = ("name", "item", "quantity", "city", "day")


def order(generator: random.Random) -> dict[str, str | int]:
    quantity = generator.choice([*NUMBERS, 15, 20, 24, 30, 40])
    values = (
        generator.choice(NAMES),
        generator.choice(ITEMS),
        quantity,
        generator.choice(CITIES),
        generator.choice(DAYS),
    )
    return dict(zip(KEYS, values))


def prompt(details: dict[str, str | int], generator: random.Random) -> str:
    quantity = details["quantity"]
    if generator.random() < 0.5:
        quantity = NUMBERS.get(int(quantity), quantity)
    text = generator.choice(FORMS).format(**details | {"quantity": quantity})
    return f"{INSTRUCTION}\n\n{text[0].upper()}{text[1:]}"


def main() -> None:
    generator = random.Random(SEED)
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = []
    for _ in range(ORDERS):
        details = order(generator)
        turns = prompt(details, generator), json.dumps(details)
        rows.append({"messages": [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turns)]})
    write("orders.jsonl", rows)
    pairs = []
    for _ in range(REVIEWS):
        details = order(generator)
        short = details | {"day": str(details["day"])[:3]}
        answers = {"chosen": json.dumps(short), "rejected": json.dumps(details)}
        pairs.append({"prompt": prompt(details, generator)} | answers)
    write("reviews.jsonl", pairs)


def write(name: str, rows: list[dict]) -> None:
    path = FOLDER / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
