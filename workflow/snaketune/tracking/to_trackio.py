"""trackio's database of a project, written without its client, which would start threads, ask the Hub for the user's name, and
send data wherever environment variables say.

A log line is one transaction with a unique key, which trackio accepts once. On shared file systems where SQLite is unreliable
trackio expects lines as files, which it imports later; there they are written as files.
"""

import os
from collections import defaultdict
from datetime import UTC, datetime

from snaketune.tracking.curves import TrackedRun


class Run:
    """One training in trackio, identified by its fingerprint."""

    def __init__(self, tracked: TrackedRun):
        # trackio reads it at import.
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
        """Do nothing: every line is already written."""
