"""Ctrl-C ends a stage with a sentence."""

import signal
import subprocess
import sys
from pathlib import Path

from snaketune.interrupts import STATUS


def test_ctrl_c_is_a_sentence_and_no_traceback(tmp_path):
    """Also while it waits for a lock, and when pressed twice."""
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from snaketune.interrupts import install\ninstall()\n"
        "from pathlib import Path\nfrom snaketune.stages.host.locks import locked\n"
        "with locked(Path(sys.argv[1]), 'demo'):\n    print('held', flush=True); time.sleep(60)\n"
    )
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", script, tmp_path / "lock"]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "held\n"
        for _ in range(2):
            process.send_signal(signal.SIGINT)
        assert process.wait(10) == STATUS
        assert process.stderr.read() == "error: interrupted; run again to resume\n"
    assert not (tmp_path / "lock.lease").exists()


def test_a_stage_listens_from_its_first_import_on():
    source = Path(__file__).parents[2] / "workflow/snaketune/__main__.py"
    first, *_ = (line for line in source.read_text(encoding="utf-8").splitlines() if "import" in line)
    assert first == "from snaketune.interrupts import install"
