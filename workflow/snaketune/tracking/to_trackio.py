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
        from trackio.fragments import FragmentWriter
        from trackio.sqlite_storage import SQLiteStorage
        from trackio.utils import get_storage_mode

        # One writer for all lines: each has a folder of its own.
        self.storage, self.fragments = SQLiteStorage, FragmentWriter() if get_storage_mode() == "jsonl" else None
        self.run = {"project": tracked.settings.project, "run": tracked.name, "run_id": tracked.fingerprint}
        self.newest: dict[str, int] = defaultdict(lambda: -1)
        for line in SQLiteStorage.get_logs(**self.run):
            for curve in line:
                self.newest[curve] = max(self.newest[curve], line["step"])
        created = {"_Created": datetime.now(UTC).isoformat(), "_Group": tracked.stage}
        # Written with the first points only.
        self.config = None if self.newest else tracked.parameters | created

    def write(self, points: list[tuple[int, dict[str, float]]]) -> None:
        steps, values = [step for step, _ in points], [values for _, values in points]
        # Two lines of a step have different curves: of the training, and of held-out rows.
        keys = [f"{self.run['run_id']}-{step}-{min(curves)}" for step, curves in points]
        if self.fragments:
            from trackio.fragments import metric_record

            line = self.run | {"timestamp": datetime.now(UTC).isoformat()}
            records = [
                metric_record(line | {"metrics": metrics, "step": step, "log_id": key}) | {"config": self.config}
                for step, metrics, key in zip(steps, values, keys)
            ]
            self.fragments.write_local(records)
        else:
            self.storage.bulk_log(**self.run, metrics_list=values, steps=steps, log_ids=keys, config=self.config)
        self.config = None

    def close(self, finished: bool) -> None:
        """Do nothing: every line is already written."""
