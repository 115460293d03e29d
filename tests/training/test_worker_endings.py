"""When several workers fail, the first failure is reported and not its echo in the others."""

import pytest
import torch.distributed

from snaketune.errors import SnaketuneError
from snaketune.training.launch import worker_endings
from snaketune.training.launch.worker_endings import clear_endings, first_failure, record_failure

GLOO = RuntimeError("[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:426: Connection reset by peer")
OURS = SnaketuneError("step 3: loss nan")


@pytest.fixture
def fail(tmp_path, monkeypatch):
    """Record failures of workers, one after the other, and return the reported one."""
    clock = iter(range(9))
    monkeypatch.setattr(worker_endings.time, "time", lambda: next(clock))
    monkeypatch.setattr(worker_endings.socket, "gethostname", lambda: "node7")

    def failing(*ranks: tuple[int, Exception], of: int = 3) -> str:
        for rank, error in ranks:
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(of))
            record_failure(tmp_path, error, str(error) if isinstance(error, SnaketuneError) else None)
        return first_failure(tmp_path)

    return failing


def test_no_record_gives_an_empty_message(tmp_path):
    assert first_failure(tmp_path) == ""


def test_the_first_of_several_failures_is_reported(fail):
    assert fail((2, OURS), (0, SnaketuneError("later"))) == "process 2 of 3 on node7: step 3: loss nan"


def test_a_single_process_is_not_named(fail):
    assert fail((0, OURS), of=1) == "step 3: loss nan"


def test_an_unexpected_error_is_reported_with_its_type(fail):
    assert fail((1, KeyError("weights"))) == "process 1 of 3 on node7: KeyError: 'weights'"


@pytest.mark.parametrize("echo", [GLOO, torch.distributed.DistBackendError("remote process exited")])
def test_an_echo_is_not_reported_even_if_recorded_first(fail, echo):
    assert fail((0, echo), (1, OURS)) == "process 1 of 3 on node7: step 3: loss nan"


def test_only_echoes_are_no_reason(fail):
    """A process was killed, and recorded nothing."""
    assert fail((0, GLOO), (2, GLOO)) == ""


def test_failures_of_an_earlier_attempt_are_cleared(fail, tmp_path):
    fail((0, OURS))
    clear_endings(tmp_path)
    assert first_failure(tmp_path) == ""


def test_a_record_that_cannot_be_written_raises_nothing(tmp_path):
    record_failure(tmp_path / "not there", OURS, "step 3: loss nan")
    assert first_failure(tmp_path / "not there") == ""
