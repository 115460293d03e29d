"""Whether a processor has units for products of bfloat16 matrices."""

import pytest

from snaketune.models import cpu_units as cpu

FLAGS = "flags\t\t: fpu avx2 avx512f"


@pytest.mark.parametrize(
    ("info", "limit", "has"),
    [
        (f"{FLAGS} avx512_bf16 amx_tile\n", "", True),
        (f"{FLAGS} amx_bf16\n", "DEFAULT", True),
        (f"{FLAGS} avx512_bf16\n", "avx512_core_bf16", True),
        (f"{FLAGS} avx512_bf16\n", "avx512_core", False),
        (f"{FLAGS} avx512_vnni\n", "", False),
        ("model name\t: avx512_bf16\n", "", False),
        (None, "", False),
    ],
)
def test_the_processor_and_the_limit_of_its_library_count(tmp_path, monkeypatch, info, limit, has):
    if info is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{info}", encoding="utf-8")
    monkeypatch.setattr(cpu, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setenv(cpu.LIMIT, limit)
    assert cpu.has_bfloat16_units() is has


def test_the_processor_is_named_as_by_linux(tmp_path):
    table = tmp_path / "cpuinfo"
    table.write_text("processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\nmodel name\t: other\n")
    assert cpu.cpu_info("model name", table) == "AMD EPYC 9654 96-Core Processor"
    # Linux on ARM doesn't name it, and other systems have no such file.
    unnamed = tmp_path / "unnamed"
    unnamed.write_text("processor\t: 0\nCPU part\t: 0xd0c\n")
    assert cpu.cpu_info("model name", unnamed) == "" == cpu.cpu_info("model name", tmp_path / "none")
