"""Work that the report compares with stays when old work is freed."""

import json
from pathlib import Path

from snaketune.stages.cache.clean import clean


def test_results_that_the_report_compares_with_are_retained(tmp_path: Path):
    results = tmp_path / "results"
    for stage, fingerprint in (("dpo", "aa"), ("eval", "bb"), ("dpo", "cc")):
        (results / ".work" / stage / fingerprint).mkdir(parents=True)
    (results / "report").mkdir()
    manifest = {"fingerprint": "dd", "compared": ["aa", "bb"]}
    (results / "report/manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    clean(results / ".work", remove=True)
    assert {path.name for path in (results / ".work").glob("*/*")} == {"aa", "bb"}
