"""Check while planning that lm-evaluation-harness ships tasks of the configured names.

Building its own index takes fifteen seconds. Searching its files for the names takes milliseconds for names that exist, and a
second for a missing one, for which all 14,000 files are read. The search can accept a word that isn't a task, such as an item
of another list; the stage then reports that before it loads a model.
"""

import os
import re
from importlib.util import find_spec
from pathlib import Path

from snaketune.config.suggestions import unknown
from snaketune.config.workflow import Workflow
from snaketune.errors import SnaketuneError

# `task: name`, `"task": "name"`, `- group: name`, `tag: [one, two]`, and `- name` in lists of them.
NAMED = re.compile(rb"""^[ ]*(?:-[ ]+)?(?:["']?(?:task|group|tag)["']?[ ]*:|-)[ ]*(\S[^\n#]*)""", re.MULTILINE)
SEPARATORS = b" \t\r\"'[]{}"


def check_shipped_tasks(config: Workflow) -> None:
    """Check the names under `eval.NAME.tasks` against the installed lm-evaluation-harness. Without it, every name is accepted.

    Raises:
        SnaketuneError: a task doesn't exist; suggests the nearest name.
    """
    configured = {name: one.tasks.names for name, one in config.eval.items() if one.tasks and one.tasks.folder is None}
    folder = tasks_folder()
    if not configured or folder is None:
        return
    known: set[str] = set()
    names = {name for some in configured.values() for name in some}
    # Most tasks are in a folder that their name begins with, so searching those first reads few files.
    for path in sorted(folder.iterdir(), key=lambda path: -max(_common_prefix(path.name, name) for name in names)):
        known |= task_names(path)
        if names <= known:
            return
    for evaluation, names in configured.items():
        for name in names:
            if name not in known:
                raise SnaketuneError(
                    f"eval.{evaluation}.tasks.names: lm-evaluation-harness ships no task, tag or group {name!r}"
                    f"{unknown(name, known)} (`lm-eval ls tasks` lists all; tasks of your own need `folder`)"
                )


def tasks_folder() -> Path | None:
    """The folder of lm-evaluation-harness' tasks; None if it isn't installed. Doesn't import it."""
    spec = find_spec("lm_eval")
    return Path(spec.submodule_search_locations[0]) / "tasks" if spec else None


def _common_prefix(one: str, other: str) -> int:
    """The length of the common prefix."""
    return next((n for n, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def task_names(folder: Path) -> set[str]:
    """The names of all tasks, tags and groups in the task files of a folder, and some other words."""
    values: set[bytes] = set()
    for path, _, files in os.walk(folder):
        # Included files may have any suffix other than these.
        texts = (file for file in files if not file.endswith((".py", ".pyc", ".md", ".sh", ".json", ".jpg")))
        for file in texts:
            values.update(NAMED.findall(Path(path, file).read_bytes()))
    names = (name.strip(SEPARATORS) for value in values for name in value.split(b","))
    return {name.decode("utf-8", "replace") for name in names if name}
