"""Texts and conversations to compare on, written here: languages, code, numbers, whitespace, and control tokens as text.

No text by itself starts with a space: there, Hugging Face's tokenizer.json of a sentencepiece vocabulary leaves one out.
"""

from itertools import pairwise

Row = list[dict[str, str]]

CONTROL = (
    "<s>", "</s>", "[INST]", "[/INST]", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<pad>",
    "[TOOL_CALLS]",
)  # fmt: skip
LANGUAGES = (
    "The quick brown fox doesn't jump over the lazy dog's back, does it?",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Voix ambiguë d'un cœur qui, au zéphyr, préfère les jattes de kiwis.",
    "Съешь ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "いろはにほへと ちりぬるを 漢字とカタカナ。",
    "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "نص حكيم له سر قاطع وذو شأن عظيم",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "Tiếng Việt có dấu: ươ ễ ậ ỹ",
)
CODE = (
    "def f(x: int) -> int:\n    return x ** 2  # square\n\n\nprint(f(3))\n",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i] * b[i];\n}\n",
    '{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2, 3], "x": null}}',
    "SELECT a.id, COUNT(*) FROM t AS a WHERE a.x >= 10 GROUP BY 1;\r\n-- done\r\n",
    "<html><body class='a b'>&nbsp;</body></html>",
    "\\frac{a}{b} \\sum_{i=1}^{n} x_i",
)
NUMBERS = ("0 1 12 123 1234 12345 1234567", "3.14159 -2.5e-10 1,000,000.00 0xFF", "2024-02-29T12:34:56Z", "½ ² ٣ 四 Ⅷ")
SPACES = (
    "a b  c   d    e", "tab\tbetween\t\ttwo", "line\nline\n\nline\n\n\nline", "windows\r\nlines\r\n\r\nhere",
    "trailing ", "trailing\n", "a \n b \n\n  c", "no\u00a0break\u3000wide\u200bzero",
)  # fmt: skip
SYMBOLS = (
    "👩‍👩‍👧 😀🇩🇪 ☂︎", "e\u0301 vs é, ﬁ vs fi, Å vs Å", "a" * 40 + "!" * 20, "…—–“”‘’«»„“ •·", "won't I'LL we've THEY'RE",
)  # fmt: skip
TEXTS = (*LANGUAGES, *CODE, *NUMBERS, *SPACES, *SYMBOLS, *(f"before {name} after {name}" for name in CONTROL))


def conversation(*contents: str, system: str | None = None) -> Row:
    """Return a conversation of alternating user and assistant turns."""
    turns = [{"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system is not None else turns


ROWS = (
    conversation("Hi", "Hello! How can I help?"),
    conversation("Hi", "Hello!", "And now?", "Nothing more."),
    conversation("Who are you?", "An assistant.", system="You are kind."),
    *(conversation(question, answer) for question, answer in pairwise(LANGUAGES)),
    *(conversation("Write it.", text.strip()) for text in (*CODE, *NUMBERS)),
    # mistral-common takes spaces off the end of an answer, and we don't.
    *(conversation(text, text.strip()) for text in (*SPACES, " leading", "   three leading", "\n\nlines before")),
    conversation("two\n\nparagraphs", "one\n\n- a\n- b\n\n```python\nprint(1)\n```"),
    *(conversation(f"Say {name}.", f"{name} it is, {name}") for name in CONTROL),
)
# Templates differ in whether the system turn is before the first or the last question.
LONG_SYSTEM = (conversation("Hi", "Hello!", "And now?", "Nothing more.", system="You are kind."),)
