"""Generate config/schema.json and the tables of config/README.md from the config models.

Run by: make docs
"""

import json
from pathlib import Path

from snaketune.config.schema import config_schema, with_tables
from snaketune.stages.table import STAGES

CONFIG = Path(__file__).parents[1] / "config"

if __name__ == "__main__":
    schema = json.dumps(config_schema(STAGES), indent=2, ensure_ascii=False)
    (CONFIG / "schema.json").write_text(schema + "\n", encoding="utf-8")
    readme = CONFIG / "README.md"
    readme.write_text(with_tables(readme.read_text(encoding="utf-8")), encoding="utf-8")
