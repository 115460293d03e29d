"""The processor, and its units for products of bfloat16 matrices, found without torch: cache keys depend on them."""

import os
import re
from functools import cache
from pathlib import Path

# Data type of such a computation, in manifests and cache keys.
WITH_BFLOAT16_PRODUCTS = "float32 with bfloat16 products"
CPU_INFO = Path("/proc/cpuinfo")
# Names of Linux for AVX512-BF16 (AMD since Zen 4, Intel since Cooper Lake) and AMX-BF16 (Intel since Sapphire Rapids).
FLAGS = {"avx512_bf16", "amx_bf16"}
# oneDNN's own limits to older instructions, under which it converts bfloat16 to float32.
LIMIT = "ONEDNN_MAX_CPU_ISA"
OLDER = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}


def has_bfloat16_units() -> bool:
    """Whether oneDNN, torch's library for such products, uses instructions for them: on Linux, unless LIMIT excludes them."""
    flags = cpu_info("flags", CPU_INFO).split()
    return os.environ.get(LIMIT, "").upper() not in OLDER and not FLAGS.isdisjoint(flags)


@cache
def cpu_info(name: str, table: Path = CPU_INFO) -> str:
    """Return what Linux tells about the first core under this name; empty if there is no such entry, and elsewhere."""
    try:
        found = re.search(rf"^{name}\s*:(.*)", table.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""
