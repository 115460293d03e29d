"""Fixtures: invented results, and the report of a sweep, which is built once."""

from pathlib import Path

import pytest
import yaml
from invented_results import Results

from snaketune.report.charts import style


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path)


@pytest.fixture(autouse=True)
def figures_as_needed(request, monkeypatch):
    """Draw figures once, without layout and SVG, which take most of a report's time, but for tests that are marked to read
    them."""
    if not request.node.get_closest_marker("figures"):
        monkeypatch.setattr(style, "_svg", lambda figure, name: '<svg viewBox="0 0 1 1"></svg>')


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of `everything`, for tests that only read them."""
    results = Results(tmp_path_factory.mktemp("sweep"))
    results.everything()
    return results


@pytest.fixture(scope="session")
def sweep_pages(sweep: Results) -> Path:
    """The report of the sweep."""
    return sweep.report(title="A sweep")[1]


@pytest.fixture
def raw_default(monkeypatch) -> dict:
    """The embedded default config."""
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    return yaml.safe_load((root / "config/config.yaml").read_text(encoding="utf-8"))
