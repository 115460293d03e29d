"""Damaged files: bit flips in results, unfinished work or manifests, a source that changes while it is read, wrong clocks."""

import os
import stat
import time
from pathlib import Path

from benchmarks.torture.chain import STAGES
from benchmarks.torture.kills import begins, first_checkpoint
from benchmarks.torture.trials import SECONDS, Trial

# Who reads them, by stage; the chain is run as if it had come no further than the stage itself.
PAYLOADS = (
    "corpus/pairs/rows/train-00000.arrow", "corpus/chat/rows/held_out-00000.arrow",
    "tokenizer/small/tokenizer/tokenizer.json", "tokenizer/small/tokenizer/sentencepiece.model",
    "tokenizer/small/tokenizer/chat_template.jinja",
    "tokenize/pairs-*/1-of-1/tokens/train-index.arrow", "tokenize/chat-*/1-of-1/tokens/train-ids.arrow",
    "plan/pairs-*/plan/train-pairs.arrow", "plan/chat-*/plan/train-rows.arrow", "plan/chat-*/plan/train-pieces.arrow",
    "plan/chat-*/plan/documents.arrow", "plan/chat-*/plan/facts.json",
    "write/pairs-*/1-of-1/shards/train-00000.arrow", "pack/chat-*/shards/train-00000.arrow",
    "pack/pairs-*/shards/documents.arrow",
    "sft/run/model/model.safetensors", "sft/run/model/config.json", "sft/run/model/tokenizer.json",
    "ref_pass/*/1-of-2/logps/logps.arrow", "ref_logps/*/logps/logps.arrow", "dpo/run/model/model.safetensors",
    "eval/last/dpo-run/scores/scores.json", "eval/last/dpo-run/scores/responses.jsonl",
    "eval/last/dpo-run/scores/pairs.arrow",
)  # fmt: skip
CHECKPOINT = (
    "weights.safetensors", "optimizer.safetensors", "optimizer.json", "random-0.safetensors", "trainer_state.json",
    "complete",
)  # fmt: skip
MANIFESTS = tuple(f"{stage}, {which}" for which in ("published", "work folder") for stage in STAGES[:-1])
CLOCKS = {"set back a day": {"clock": -86400.0}, "set forward a day": {"clock": 86400.0}, "another time zone": {}}


def flip(path: Path, trial: Trial) -> None:
    """Flip one bit of a file in place, for all its hard links."""
    content = bytearray(path.read_bytes())
    at = trial.drawn.randrange(len(content))
    content[at] ^= 1 << trial.drawn.randrange(8)
    stands = path.stat()
    # Tables and weights are read-only.
    path.chmod(stands.st_mode | stat.S_IWUSR)
    path.write_bytes(content)
    # A failing disk doesn't update times.
    os.utime(path, ns=(stands.st_atime_ns, stands.st_mtime_ns))
    trial.counts["byte"] = f"{at} of {len(content)}"


def in_payload(trial: Trial) -> None:
    """Flip a bit of a published file before later stages read it."""
    chain = trial.until(trial.point.split("/")[0])
    flip(min(chain.results.glob(trial.point)), trial)
    trial.recover(unlock=False)


def in_checkpoint(trial: Trial) -> None:
    """Flip a bit of a killed training's checkpoint before it is resumed."""
    chain = trial.before("sft")
    running = chain.start(*trial.targets)
    first_checkpoint(chain)
    chain.kill(running)
    flip(first_checkpoint(chain).with_name(trial.point), trial)
    trial.recover(unlock=True)


def in_manifest(trial: Trial) -> None:
    """Flip a bit of a published manifest, or of the one in the work folder of a result that is no longer published."""
    stage, which = trial.point.split(", ")
    chain = trial.until(stage)
    point = trial.drawn.choice([point for point in trial.reference.state if point.split("/")[0] == stage])
    damaged = chain.results / point
    if which == "work folder":
        damaged.unlink()
        fingerprint = trial.reference.state[point]["manifest"]["fingerprint"]
        damaged = chain.results / ".work" / stage / fingerprint / "manifest.json"
    flip(damaged, trial)
    trial.recover(unlock=False)


def source_changed(trial: Trial) -> None:
    """Exchange a corpus file while it is read, and put it back."""
    chain = trial.before("corpus", to="tokenize")
    source = chain.folder / "data/chat.jsonl"
    content, stands = source.read_bytes(), source.stat()
    running = chain.start(*trial.targets)
    begins(chain, "snaketune corpus")
    time.sleep(trial.drawn.uniform(0, 3))
    *lines, one, other = content.splitlines(keepends=True)
    source.write_bytes(b"".join([*lines, other, one]))
    trial.check_message(chain.wait(running, SECONDS), fails=None)
    source.write_bytes(content)
    if trial.drawn.random() < 0.5:
        # With its former time, as `cp -p` sets it.
        os.utime(source, ns=(stands.st_atime_ns, stands.st_mtime_ns))
    trial.recover(unlock=False)


def wrong_clock(trial: Trial) -> None:
    """Set the clock wrong in the middle of a run and kill it, so that its files have wrong times."""
    chain = trial.before("sft", to="ref_logps")
    orders = CLOCKS[trial.point]
    chain.order(**orders)
    running = chain.start(*trial.targets)
    begins(chain, "snaketune.training.launch.worker")
    time.sleep(trial.drawn.uniform(0, 1))
    (chain.folder / "clock-is-wrong").touch()
    trial.kill(running, after=trial.drawn.uniform(1, 8))
    seconds = orders.get("clock", 0.0)
    if not seconds:
        chain.extra["TZ"] = "Pacific/Kiritimati"
    for path in chain.results.rglob("*"):
        # Seen from the new time, what was made before it is of the future, or the past.
        if path.is_file() and not path.is_symlink():
            os.utime(path, (path.stat().st_mtime - seconds,) * 2)
    trial.recover(unlock=True, orders=orders)
