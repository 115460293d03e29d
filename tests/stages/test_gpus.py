"""GPU slots: each job its own, also of those that SLURM gave to several."""

import os

import pytest

from snaketune.errors import SnaketuneError
from snaketune.stages.gpus import claimed_gpus, visible_gpus


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,GPU-abc")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def test_jobs_at_the_same_time_get_different_gpus_and_see_only_those(four_gpus, tmp_path, monkeypatch):
    with claimed_gpus(2, tmp_path) as first:
        assert first == ["0", "1"]
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,GPU-abc")  # another process
        with claimed_gpus(2, tmp_path) as second:
            assert second == ["2", "GPU-abc"]
        with claimed_gpus(1, tmp_path) as third:
            assert third == ["2"]


def test_more_gpus_than_there_are_is_an_error(four_gpus, tmp_path):
    with pytest.raises(SnaketuneError, match="asks for 5 GPUs, this machine shows 4"), claimed_gpus(5, tmp_path):
        pass


def test_of_what_slurm_gives_a_job_it_takes_no_more_than_it_asked_for(four_gpus, tmp_path, monkeypatch):
    """Two GPUs for one process would be two halves of a batch, by nn.DataParallel, without a word."""
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with claimed_gpus(1, tmp_path):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_jobs_of_slurm_may_number_their_gpus_alike(four_gpus, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with claimed_gpus(1, tmp_path):
        monkeypatch.setenv("SLURM_JOB_ID", "2")
        # It is another GPU, or it would be waited for.
        with claimed_gpus(1, tmp_path) as claimed:
            assert claimed == ["0"]


def test_without_gpus_nothing_is_claimed(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with claimed_gpus(1, tmp_path) as claimed:
        assert claimed == []


@pytest.mark.parametrize(
    ("told", "seen"),
    [
        ("-1", []),
        ("NoDevFiles", []),
        ("", []),
        ("0, 1", ["0", "1"]),
        ("2,-1,3", ["2"]),
        ("GPU-8932f937,MIG-GPU-1/2/3", ["GPU-8932f937", "MIG-GPU-1/2/3"]),
    ],
)
def test_what_cuda_hides_isnt_seen(monkeypatch, told, seen):
    """Of what is after the first one that it doesn't know, CUDA shows nothing."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    assert visible_gpus() == seen
