"""Terminal escape sequences in whatever messages quote: escaped where the messages leave the process."""

import io
import subprocess
import sys

import pytest

from snaketune.artifacts.manifest import write_manifest
from snaketune.stages.cache.code_digest import PACKAGE_FOLDER
from snaketune.stages.host.streams import EscapedStream

# It would set the title of the window, clear the screen, and hide the rest.
ESCAPES = "\x1b]0;HACKED\x07\x1b[2J\x9b8m\r\u202e"
MAIN = 'if __name__ == "__main__":\n'
CODE = """
import logging, sys, warnings
from snaketune.stages.cache.libraries import quiet_libraries
from snaketune.errors import SnaketuneError
quiet_libraries()
text = sys.argv[1]
print(text, "half a pair: \\udc80", flush=True)
warnings.warn(text)
logging.getLogger("library").error(text)
raise SnaketuneError(f"{text} hf_{'a' * 30}")
"""


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        ("a\tb\nc\r\n", "a\tb\nc\n"),
        ("\r 50%|███", "\r 50%|███"),
        ("all\rnothing", "all\\rnothing"),
        ("\x1b[31mred\x1b[0m", "\\u001b[31mred\\u001b[0m"),
        ("\x9b2J\x7f\x00\b", "\\u009b2J\\u007f\\u0000\\b"),
        ("\u202eabc\u2066\u200b", "\\u202eabc\\u2066\\u200b"),
        ("\udc80", "\\udc80"),
        ("https://me:word@host hf_" + "a" * 30, "https://…@host …"),
        ("https://me:w@rd@host/@x", "https://…@host/@x"),
    ],
)
def test_control_characters_are_escaped_where_messages_leave_the_process(written, printed):
    raw = io.BytesIO()
    stream = EscapedStream(raw, encoding="utf-8", errors="backslashreplace", newline="\n")
    print(written, end="", file=stream, flush=True)
    assert raw.getvalue().decode() == printed


def test_so_are_warnings_logs_and_tracebacks_of_libraries():
    """Bytes of another encoding too, and with a terminal that has no UTF-8."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, ESCAPES],
        capture_output=True,
        env={"PYTHONPATH": ":".join(sys.path), "LC_ALL": "C"},
    )
    for printed in (done.stdout, done.stderr):
        text = printed.decode()
        assert text.count("HACKED") in (1, 3)
        assert not [character for character in text if not character.isprintable() and character not in "\n\t"]
    assert b"SnaketuneError" in done.stderr and b"hf_" not in done.stderr


def test_every_process_of_the_package_prints_this_way(tmp_path):
    texts = [(path, path.read_text("utf-8")) for path in PACKAGE_FOLDER.rglob("*.py")]
    starts = [(path, text) for path, text in texts if MAIN in text or "import multiprocessing" in text]
    # A supervisor prints nothing; the job that starts it prints what its command prints.
    starts = [(path, text) for path, text in starts if path.name != "supervisor.py"]
    assert {path.name for path, _ in starts} == {"__main__.py", "worker.py", "scorer.py"}
    assert all("    quiet_libraries()\n" in text for path, text in starts)
    job = tmp_path / f"job{ESCAPES.replace('/', '')}"
    command = [sys.executable, "-m", "snaketune", "corpus", job]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 1 and "HACKED" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_what_planning_quotes_of_results_is_escaped_too(fresh):
    manifest = fresh.folder / "results/corpus/chat/manifest.json"
    manifest.parent.mkdir(parents=True)
    about = {"stage": "corpus", "code": ESCAPES, "spec": {ESCAPES: ESCAPES}, "inputs": {ESCAPES: [ESCAPES]}}
    write_manifest(manifest, about | {"payload": {}, "records": {}, "versions": {ESCAPES: ESCAPES}})
    said = fresh.snakemake("--dry-run", "results/corpus/chat/manifest.json")
    assert "HACKED" in said and "\x1b" not in said
    fresh.config["corpora"]["chat"][ESCAPES] = 1
    said = fresh.snakemake("--dry-run", check=False)
    assert "HACKED" in said and "\x1b" not in said
