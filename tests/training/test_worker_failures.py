"""Of several processes that fail, the first is told, and not its echo in the others."""

import pytest
import torch.distributed

from snaketune.errors import SnaketuneError
from snaketune.training.launch import worker_failures
from snaketune.training.launch.worker_failures import clear_failures, first_failure, record_failure

GLOO = RuntimeError("[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:426: Connection reset by peer")
OURS = SnaketuneError("step 3: loss nan")


@pytest.fixture
def fail(tmp_path, monkeypatch):
    """Let processes of a group of three fail, one after the other."""
    clock = iter(range(9))
    monkeypatch.setattr(worker_failures.time, "time", lambda: next(clock))
    monkeypatch.setattr(worker_failures.socket, "gethostname", lambda: "node7")

    def failing(*ranks: tuple[int, Exception], of: int = 3) -> str:
        for rank, error in ranks:
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(of))
            record_failure(tmp_path, error, str(error) if isinstance(error, SnaketuneError) else None)
        return first_failure(tmp_path)

    return failing


def test_nothing_said_is_nothing_told(tmp_path):
    assert first_failure(tmp_path) == ""


def test_the_first_of_several_is_told(fail):
    assert fail((2, OURS), (0, SnaketuneError("later"))) == "process 2 of 3 on node7: step 3: loss nan"


def test_one_process_needs_no_name(fail):
    assert fail((0, OURS), of=1) == "step 3: loss nan"


def test_a_fault_of_ours_is_named_with_its_kind(fail):
    assert fail((1, KeyError("weights"))) == "process 1 of 3 on node7: KeyError: 'weights'"


@pytest.mark.parametrize("echo", [GLOO, torch.distributed.DistBackendError("remote process exited")])
def test_an_echo_is_not_the_cause_though_it_came_first(fail, echo):
    assert fail((0, echo), (1, OURS)) == "process 1 of 3 on node7: step 3: loss nan"


def test_echoes_alone_are_of_a_process_that_was_killed(fail):
    assert fail((0, GLOO), (2, GLOO)).startswith("one of its processes was killed")


def test_an_earlier_attempt_is_forgotten(fail, tmp_path):
    fail((0, OURS))
    clear_failures(tmp_path)
    assert first_failure(tmp_path) == ""


def test_on_a_full_disk_the_error_itself_comes_through(tmp_path):
    record_failure(tmp_path / "not there", OURS, "step 3: loss nan")
    assert first_failure(tmp_path / "not there") == ""
