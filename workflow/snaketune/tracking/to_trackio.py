"""trackio's database of a project, written without its client, which would start threads, ask the Hub for a user's name, and go
wherever the environment tells it.

A line is one transaction, under a key of its own that trackio takes once: where two nodes share a file system that SQLite can't
be trusted on, trackio wants lines as files and imports them later, and so they are written.
"""

import os
from collections import defaultdict
from datetime import UTC, datetime

from snaketune.tracking.curves import TrackedRun


class Run:
    """One training; its identity is its fingerprint, whatever else had its name."""

    def __init__(self, tracked: TrackedRun):
        # Read where trackio is imported.
        os.environ.setdefault("TRACKIO_DIR", str((tracked.results / "trackio").absolute()))
        from trackio.fragments import FragmentWriter, metric_record
        from trackio.sqlite_storage import SQLiteStorage
        from trackio.utils import get_storage_mode

        self.storage, self.run = SQLiteStorage, {"run": tracked.name, "run_id": tracked.fingerprint}
        self.run["project"] = tracked.settings.project
        self.fragments = (FragmentWriter(), metric_record) if get_storage_mode() == "jsonl" else None
        newest = SQLiteStorage.get_max_step_for_run(**self.run) or 0
        self.newest: dict[str, int] = defaultdict(lambda: newest)
        group = tracked.name.partition("/")[0]
        self.config = tracked.parameters | {"_Created": datetime.now(UTC).isoformat(), "_Group": group}
        if newest:
            self.config = None

    def write(self, points: list[tuple[int, dict[str, float]]]) -> None:
        now = datetime.now(UTC).isoformat()
        keys = [f"{self.run['run_id']}-{step}" for step, _ in points]
        if self.fragments:
            writer, record = self.fragments
            writer.write_local(
                [
                    record(self.run | {"metrics": values, "step": step, "timestamp": now, "log_id": key})
                    | {"config": self.config}
                    for (step, values), key in zip(points, keys)
                ]
            )
        else:
            self.storage.bulk_log(
                **self.run,
                metrics_list=[values for _, values in points],
                steps=[step for step, _ in points],
                log_ids=keys,
                config=self.config,
            )
        self.config = None

    def close(self, finished: bool) -> None:
        """Nothing waits."""
