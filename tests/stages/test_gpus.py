"""GPU slots: each job its own, also of those that SLURM gave to several."""

import os
import shutil
from pathlib import Path

import pytest

from snaketune.errors import SnaketuneError
from snaketune.stages.host import gpus
from snaketune.stages.host.gpus import claimed_gpus, gpu_model, visible_gpus


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
    with pytest.raises(SnaketuneError, match="requests 5 GPUs, this machine has 4"), claimed_gpus(5, tmp_path):
        pass


def test_a_job_claims_no_more_of_slurms_gpus_than_it_requested(four_gpus, tmp_path, monkeypatch):
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
    ("variable", "seen"),
    [
        ("-1", []),
        ("NoDevFiles", []),
        ("", []),
        ("0, 1", ["0", "1"]),
        ("2,-1,3", ["2"]),
        ("GPU-8932f937,MIG-GPU-1/2/3", ["GPU-8932f937", "MIG-GPU-1/2/3"]),
    ],
)
def test_what_cuda_hides_isnt_seen(monkeypatch, variable, seen):
    """CUDA ignores everything after the first entry that it doesn't know."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == seen


A100, L4 = "NVIDIA A100-SXM4-40GB", "NVIDIA L4"
ALIKE = f"GPU 0: {A100} (UUID: GPU-aaaa-1)\nGPU 1: {A100} (UUID: GPU-bbbb-2)\n"
TWO_KINDS = f"GPU 0: {L4} (UUID: GPU-aaaa-1)\nGPU 1: {A100} (UUID: GPU-bbbb-2)\nGPU 2: {A100} (UUID: GPU-cccc-3)\n"
SLICED = (
    f"GPU 0: {A100} (UUID: GPU-aaaa-1)\n"
    "  MIG 3g.20gb     Device  0: (UUID: MIG-1111)\n  MIG 3g.20gb     Device  1: (UUID: MIG-2222)\n"
)


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """An nvidia-smi that lists these GPUs."""
    # Set first, so that it is unset again afterwards, whatever a test sets meanwhile.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    def lists(text: str) -> None:
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin/list").write_text(text)
        script = tmp_path / "bin/nvidia-smi"
        script.write_text(f'#!/bin/sh\n[ "$*" = "-L" ] && cat {tmp_path}/bin/list\n')
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)

    return lists


@pytest.mark.parametrize(
    ("listed", "order", "seen", "model"),
    [
        (ALIKE, None, ["0", "1"], A100),
        # CUDA's own numbers begin with the fastest, so here UUIDs say which is meant.
        (TWO_KINDS, None, ["GPU-aaaa-1", "GPU-bbbb-2", "GPU-cccc-3"], L4),
        (TWO_KINDS, "PCI_BUS_ID", ["0", "1", "2"], L4),
        (SLICED, None, ["MIG-1111", "MIG-2222"], f"{A100} MIG 3g.20gb"),
        ("No devices were found\n", None, [], ""),
    ],
)
def test_gpus_are_those_that_the_driver_lists(driver, monkeypatch, listed, order, seen, model):
    driver(listed)
    if order:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    assert visible_gpus() == seen
    assert gpu_model() == model


@pytest.mark.parametrize(
    ("listed", "named", "model"),
    [
        (ALIKE, "1", A100),
        (TWO_KINDS, "0", ""),
        (TWO_KINDS, "GPU-bbbb-2,0", A100),
        (TWO_KINDS, "GPU-b", A100),
        (TWO_KINDS, "GPU-", ""),
        (SLICED, "MIG-2222", f"{A100} MIG 3g.20gb"),
    ],
)
def test_a_model_is_named_where_it_is_certain(driver, monkeypatch, listed, named, model):
    driver(listed)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert gpu_model() == model


def test_a_gpu_has_one_slot_whether_named_by_number_or_by_uuid(driver, tmp_path, monkeypatch):
    driver(ALIKE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aaaa-1")
    with claimed_gpus(1, tmp_path / "slots") as first:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        with claimed_gpus(1, tmp_path / "slots") as second:
            assert (first, second) == (["GPU-aaaa-1"], ["1"])


def test_several_gpus_are_of_one_model_where_there_are_as_many(driver, tmp_path, capsys):
    driver(TWO_KINDS)
    with claimed_gpus(2, tmp_path / "slots") as claimed:
        assert claimed == ["GPU-bbbb-2", "GPU-cccc-3"]
    assert not capsys.readouterr().out
    with claimed_gpus(3, tmp_path / "slots") as claimed:
        assert len(claimed) == 3
    assert f"note: 3 GPUs of different models (2 {A100}, 1 {L4}): each step waits for the slowest" in (
        capsys.readouterr().out
    )


def test_slices_of_a_card_are_a_job_each_and_never_several_of_one(driver, tmp_path, monkeypatch):
    driver(SLICED)
    with claimed_gpus(1, tmp_path / "slots") as first:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1111,MIG-2222")
        with claimed_gpus(1, tmp_path / "slots") as second:
            assert (first, second) == (["MIG-1111"], ["MIG-2222"])
        with (
            pytest.raises(
                SnaketuneError, match=r"operation\.gpus: 2 GPUs are requested, but .* slices of cards \(MIG\)"
            ),
            claimed_gpus(2, tmp_path / "slots"),
        ):
            pass


@pytest.mark.parametrize("named", ["0,0", "0,GPU-aaaa-1", "GPU-aaaa-1,GPU-aaaa"])
def test_a_gpu_that_is_named_twice_is_one(driver, tmp_path, monkeypatch, named):
    driver(ALIKE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    with claimed_gpus(1, tmp_path / "slots") as claimed:
        assert claimed == [named.split(",")[0]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    with (
        pytest.raises(SnaketuneError, match=r"requests 2 GPUs, CUDA_VISIBLE_DEVICES lists 1; lower operation\.gpus"),
        claimed_gpus(2, tmp_path / "slots"),
    ):
        pass


def test_numbers_on_a_sliced_machine_are_no_two_cards(driver, tmp_path, monkeypatch):
    driver(SLICED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(SnaketuneError, match=r"slices of cards"), claimed_gpus(2, tmp_path / "slots"):
        pass


def test_where_a_card_is_lost_the_others_are_named_by_uuid(driver):
    """nvidia-smi leaves its number out, and ends with an error; CUDA counts on."""
    driver(ALIKE.replace("GPU 1", "GPU 2") + "Unable to determine the device handle for gpu 0000:06:00.0\n")
    script = Path(shutil.which("nvidia-smi"))
    script.write_text(script.read_text() + "exit 15\n")
    assert visible_gpus() == ["GPU-aaaa-1", "GPU-bbbb-2"]


@pytest.mark.parametrize("script", ["#!/bin/sh\nsleep 60\n", "no program", "#!/bin/sh\nprintf '\\377\\376'\n"])
def test_an_nvidia_smi_that_does_not_work_is_none(driver, monkeypatch, tmp_path, script):
    driver(ALIKE)
    monkeypatch.setattr(gpus, "SECONDS_FOR_DRIVER", 0.5)
    Path(shutil.which("nvidia-smi")).write_text(script)
    assert visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with claimed_gpus(1, tmp_path / "slots") as claimed:
        assert claimed == ["0"]
