"""TensorBoard's event files, written record by record.

    results/sft/demo/tensorboard/3f9a21c4/events.out.tfevents.0000000001     the first attempt
                                          events.out.tfevents.0000000002     resumed

Each record is written unbuffered, so a killed process loses none. Neither torch's writer is used nor TensorBoard's own, which
imports TensorFlow if it is installed: imports take 0.05 s per training, a line 0.2 ms.
"""

import struct
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from snaketune.tracking.curves import TrackedRun

NAME = "events.out.tfevents."
LENGTH, CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")


class Run:
    """One training in its own folder, named after its fingerprint."""

    def __init__(self, tracked: TrackedRun):
        folder = tracked.out / "tensorboard" / tracked.fingerprint[:8]
        folder.mkdir(parents=True, exist_ok=True)
        self.newest: dict[str, int] = defaultdict(int)
        written = sorted(folder.glob(f"{NAME}*"))
        for path in written:
            for event in read_events(path):
                for value in event.summary.value:
                    self.newest[value.tag] = max(self.newest[value.tag], event.step)
        # Numbered instead of dated: TensorBoard reads files in the order of their names, and clocks of nodes may differ.
        number = 1 + max((int(path.name.removeprefix(NAME)) for path in written), default=0)
        # Unbuffered.
        self.file = (folder / f"{NAME}{number:010d}").open("xb", buffering=0)
        self._add(Event(file_version="brain.Event:2"))
        if not self.newest:
            self._add(_parameters(tracked))

    def write(self, points: list[tuple[int, dict[str, float]]]) -> None:
        for step, values in points:
            event = Event(step=step)
            for curve, value in values.items():
                event.summary.value.add(tag=curve, simple_value=value)
            self._add(event)

    def close(self, finished: bool) -> None:
        self.file.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        data = event.SerializeToString()
        length = LENGTH.pack(len(data))
        record = length + CHECKSUM.pack(masked_crc32c(length)) + data + CHECKSUM.pack(masked_crc32c(data))
        if self.file.write(record) != len(record):
            raise OSError("the disk took only part of a record")


def read_events(path: Path) -> Iterator[Event]:
    """Yield the complete records of an event file; a kill or a full disk may have truncated the last one."""
    with path.open("rb") as file:
        while len(header := file.read(LENGTH.size + CHECKSUM.size)) == LENGTH.size + CHECKSUM.size:
            length, checksum = header[: LENGTH.size], header[LENGTH.size :]
            if CHECKSUM.pack(masked_crc32c(length)) != checksum:
                return
            (size,) = LENGTH.unpack(length)
            data = file.read(size + CHECKSUM.size)
            if len(data) < size + CHECKSUM.size:
                return
            yield Event.FromString(data[:size])


def _parameters(tracked: TrackedRun) -> Event:
    """The event with the parameters that TensorBoard's HParams page shows and compares."""
    data = HParamsPluginData()
    data.session_start_info.start_time_secs = time.time()
    data.session_start_info.group_name = tracked.fingerprint
    for name, value in tracked.parameters.items():
        parameter = data.session_start_info.hparams[name]
        if isinstance(value, bool):
            parameter.bool_value = value
        elif isinstance(value, str):
            parameter.string_value = value
        else:
            parameter.number_value = value
    event = Event()
    event.summary.value.add(
        tag=metadata.SESSION_START_INFO_TAG,
        metadata=metadata.create_summary_metadata(data),
        tensor=metadata.NULL_TENSOR,
    )
    return event
