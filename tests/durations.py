"""The order of the tests: the longest first, by recorded durations, so that at the end no process waits for another one.

pytest-xdist gives each process as many tests, one block after the other, and a process that is done takes tests from the end of
another one's block. So the long tests are dealt, and each block is filled up with short ones.
"""

import heapq
import json
from collections import defaultdict
from pathlib import Path

FILE = Path(__file__).with_name("durations.json")
# Seconds; shorter ones only fill up.
LONG = 2.0


def unit_of(nodeid: str) -> str:
    """Return what runs in one process: a test that runs the workflow, or a file, whose fixtures its tests share.

    The tests of the demo share one run too.
    """
    return nodeid if nodeid.startswith("tests/workflow/") and "test_demo" not in nodeid else nodeid.split("::")[0]


def ordered(items: list, processes: int) -> list:
    """Return pytest's items in the order in which that many processes run them."""
    recorded = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    units = defaultdict(list)
    for item in items:
        units[unit_of(item.nodeid)].append(item)
    long = sorted((unit for unit in units if recorded.get(unit, 0) >= LONG), key=lambda unit: -recorded[unit])
    blocks = [(0.0, number, []) for number in range(processes)]
    for unit in long:
        seconds, number, block = heapq.heappop(blocks)
        heapq.heappush(blocks, (seconds + recorded[unit], number, [*block, *units.pop(unit)]))
    rest = [item for unit in units.values() for item in unit]
    result, share = [], len(items) // processes
    for _, _, block in sorted(blocks, key=lambda entry: entry[1]):
        count = max(0, share - len(block))
        result += block + rest[:count]
        rest = rest[count:]
    return result + rest


class Recorder:
    """Writes the durations of this run, as a pytest plugin of the process that reports."""

    def __init__(self):
        self.seconds = defaultdict(float)

    def pytest_runtest_logreport(self, report) -> None:
        self.seconds[unit_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        long = {unit: round(seconds, 1) for unit, seconds in sorted(self.seconds.items()) if seconds >= LONG}
        FILE.write_text(json.dumps(long, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
