"""Whether lm-evaluation-harness ships tasks of these names, asked while planning.

Its own index takes it fifteen seconds, so names are only looked for in its files here: milliseconds for one that is there, a
second for one that isn't, which is looked for in all 14,000. That can pass a name which is none after all (a word in a list of
something else); the stage then says so before it loads a model.
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
    """Refuse names under `eval.NAME.tasks` that the installed lm-evaluation-harness can't have; where there is none, all pass.

    Raises:
        SnaketuneError: with the nearest name that there is.
    """
    asked = {name: one.tasks.names for name, one in config.eval.items() if one.tasks and one.tasks.folder is None}
    folder = tasks_folder()
    if not asked or folder is None:
        return
    known: set[str] = set()
    wanted = {name for names in asked.values() for name in names}
    # A task mostly lies in a folder that its name begins with, so that most files needn't be read.
    for place in sorted(folder.iterdir(), key=lambda place: -max(_alike(place.name, name) for name in wanted)):
        known |= task_names(place)
        if wanted <= known:
            return
    for evaluation, names in asked.items():
        for name in names:
            if name not in known:
                raise SnaketuneError(
                    f"eval.{evaluation}.tasks.names: lm-evaluation-harness ships no task, tag or group {name!r}"
                    f"{unknown(name, known)} (`lm-eval ls tasks` lists all; tasks of your own need `folder`)"
                )


def tasks_folder() -> Path | None:
    """Where lm-evaluation-harness keeps its tasks; None if it isn't installed. Nothing of it is imported."""
    found = find_spec("lm_eval")
    return Path(found.submodule_search_locations[0]) / "tasks" if found else None


def _alike(one: str, other: str) -> int:
    """How many letters both begin with."""
    return next((n for n, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def task_names(folder: Path) -> set[str]:
    """The names of all tasks, tags and groups in task files, and some other words."""
    found: set[bytes] = set()
    for place, _, files in os.walk(folder):
        # What is included has any name, but none of these.
        texts = (file for file in files if not file.endswith((".py", ".pyc", ".md", ".sh", ".json", ".jpg")))
        for file in texts:
            found.update(NAMED.findall(Path(place, file).read_bytes()))
    parts = (part.strip(SEPARATORS) for value in found for part in value.split(b","))
    return {part.decode("utf-8", "replace") for part in parts if part}
