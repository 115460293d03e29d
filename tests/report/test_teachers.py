"""Where models part from a teacher, in the report."""

import json
import re

from invented_results import Results

HOSTILE = "<script>alert(1)</script>\n\u202e"


def compare(results: Results, name: str, agreement: float, parting: list[dict]) -> None:
    """Write an evaluation with a comparison with a teacher."""
    entry = {"agreement": agreement, "agreement_interval": [agreement - 0.01, agreement + 0.01], "kl": 0.25}
    entry |= {"kl_interval": None, "tokens": 1234, "parting": parting}
    results.evaluate(name, preferences=(), teachers={"teacher": entry})


def test_the_section_has_each_model_and_its_tokens_escaped(results):
    parted = {"teacher": " 4", "model": HOSTILE, "count": 7, "nats": 12.5, "after": "2 + 2 =\n"}
    compare(results, "main/base-demo", 0.5, [])
    compare(results, "main/sft-demo", 0.9, [parted])
    _, pages = results.report()
    page = (pages / "index.html").read_text(encoding="utf-8")
    (section,) = re.findall(r'<section id="teacher">.*?</section>', page, re.DOTALL)
    assert "50% [49%, 51%] the same token, 0.25 nats per token, 1,234 tokens" in section
    assert section.count("where it parts from the teacher") == 1 and "<script>" not in section
    assert "&#34; 4&#34;" in section and "2 + 2 =\\n" in section and "\u202e" not in section
    # Among the scores, too.
    scores = json.loads((pages / "evaluation.json").read_text(encoding="utf-8"))["main"]
    assert scores["sft:demo"]["teachers"]["teacher"]["agreement"] == 0.9
    assert "same most likely token" in page
