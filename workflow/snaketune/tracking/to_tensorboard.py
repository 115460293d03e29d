"""TensorBoard's event files, written record by record.

    results/sft/demo/tensorboard/3f9a21c4/events.out.tfevents.0000000001     the first attempt
                                          events.out.tfevents.0000000002     resumed

Each record goes to the operating system at once, so a killed process loses none. Neither TensorFlow, which TensorBoard's own
writer would import where it is installed, nor torch's writer is needed: 0.05 s of imports in a training, 0.2 ms a line.
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
    """One training in a folder of its own; what replaces it under its name gets another one."""

    def __init__(self, tracked: TrackedRun):
        folder = tracked.out / "tensorboard" / tracked.fingerprint[:8]
        folder.mkdir(parents=True, exist_ok=True)
        self.newest: dict[str, int] = defaultdict(int)
        written = sorted(folder.glob(f"{NAME}*"))
        for path in written:
            for event in read_events(path):
                for value in event.summary.value:
                    self.newest[value.tag] = max(self.newest[value.tag], event.step)
        # Numbered and not dated, since TensorBoard reads them in this order, and two nodes' clocks may differ.
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
            raise OSError("the disk took half a record")


def read_events(path: Path) -> Iterator[Event]:
    """The complete records of an event file; a kill or a full disk may have cut the last one off."""
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
    """What the hyperparameters' page shows and compares."""
    data = HParamsPluginData()
    data.session_start_info.start_time_secs = time.time()
    data.session_start_info.group_name = tracked.fingerprint
    for name, value in tracked.parameters.items():
        of = data.session_start_info.hparams[name]
        if isinstance(value, bool):
            of.bool_value = value
        elif isinstance(value, str):
            of.string_value = value
        else:
            of.number_value = value
    event = Event()
    event.summary.value.add(
        tag=metadata.SESSION_START_INFO_TAG,
        metadata=metadata.create_summary_metadata(data),
        tensor=metadata.NULL_TENSOR,
    )
    return event
