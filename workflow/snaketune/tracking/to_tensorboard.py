"""TensorBoard's event files, written record by record.

    results/sft/demo/tensorboard/3f9a21c4/events.out.tfevents.0000000001     the first attempt
                                          events.out.tfevents.0000000002     resumed

Each record is flushed, so a killed process loses none. TensorBoard's writer of whole files isn't used: it buffers them in a
thread, and imports TensorFlow if that is installed.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from snaketune.tracking.curves import TrackedRun

NAME = "events.out.tfevents."


class Run:
    """One training in its own folder, named after its fingerprint."""

    def __init__(self, tracked: TrackedRun):
        folder = tracked.out / "tensorboard" / tracked.fingerprint[:8]
        folder.mkdir(parents=True, exist_ok=True)
        self.newest: dict[str, int] = defaultdict(lambda: -1)
        written = sorted(folder.glob(f"{NAME}*"))
        for event in (event for path in written for event in read_events(path)):
            for value in event.summary.value:
                self.newest[value.tag] = max(self.newest[value.tag], event.step)
        # Numbered instead of dated: TensorBoard reads files in the order of their names, and clocks of nodes may differ.
        number = 1 + max((int(path.name.removeprefix(NAME)) for path in written), default=0)
        self.file = (folder / f"{NAME}{number:010d}").open("xb")
        self._add(file_version="brain.Event:2")
        if not self.newest:
            # For TensorBoard's HParams page.
            self._add(summary=hparams_pb(tracked.parameters, trial_id=tracked.fingerprint))

    def write(self, points: list[tuple[int, dict[str, float]]]) -> None:
        for step, values in points:
            curves = [Summary.Value(tag=curve, simple_value=value) for curve, value in values.items()]
            self._add(step=step, summary=Summary(value=curves))

    def close(self, finished: bool) -> None:
        self.file.close()

    def _add(self, **fields) -> None:
        RecordWriter(self.file).write(Event(wall_time=time.time(), **fields).SerializeToString())
        self.file.flush()


def read_events(path: Path) -> Iterator[Event]:
    """Yield the complete records of an event file; a kill or a full disk may have truncated the last one."""
    reader = PyRecordReader_New(str(path))
    with suppress(OutOfRangeError, DataLossError):
        while True:
            reader.GetNext()
            yield Event.FromString(reader.record())
