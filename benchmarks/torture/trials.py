"""One trial: a chain is broken, run again as the README says, and compared with an undisturbed chain."""

import json
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT
from benchmarks.torture.chain import CODE, CONFIG, INJECTED, STAGES, Chain, Said
from benchmarks.torture.processes import everything_in

from snaketune.artifacts.digests import digest_json
from snaketune.files import digest_file
from snaketune.stages.table import STAGES as TABLE

SECONDS = 300.0
TRACEBACK = re.compile(r"Traceback \(most recent call last\)[^\n]*\n((?:[ \n][^\n]*\n|\n)*)")
# Commands that messages name, in the order in which they are searched. What is to be removed is named in full, or a message
# begins with its path.
REBUILD = re.compile(r"rm (\S+/manifest\.json) && snakemake(?: --configfile \S+)?")
REMOVE = re.compile(
    r"error: (\S+?):? .*\bremove (it|the manifest|the file's folder|\S+?)[;,)]? (?:and run again|to begin again)"
)
AGAIN = re.compile(r"[^.;]*\b[Rr]un again[^.;]*")
RUNS_AGAIN = 4
# By stage, the stage up to which a chain must run to read all of its files.
READ_BY = {
    "corpus": "write", "tokenizer": "write", "tokenize": "write", "plan": "pack", "write": "pack", "pack": "ref_pass",
    "sft": "ref_pass", "ref_pass": "ref_logps", "ref_logps": "dpo", "dpo": "eval", "eval": "report", "card": "report",
}  # fmt: skip
# Files that a stage writes before it holds the lock.
CLAIMS = re.compile(r"/\.?(training\.)?lock[^/]*$")


class Failed(Exception):
    """A trial that failed."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """An undisturbed chain.

    Attributes:
        seconds: that it took.
        state: of all published results, what is compared.
        code: digest of what it ran.
    """

    chain: Chain
    seconds: float
    state: dict[str, Any]
    code: str

    @classmethod
    def make(cls, folder: Path, *targets: str) -> "Reference":
        """Run the reference chain up to these files, unless it exists."""
        chain, took, made_by = Chain(folder), folder / "seconds", folder / "code"
        code = code_of(ROOT)
        if not took.is_file() or made_by.read_text() != code:
            shutil.rmtree(folder, ignore_errors=True)
            chain.write()
            begun = time.monotonic()
            said = chain.snakemake(*targets, seconds=4 * SECONDS)
            if said.status != 0:
                raise SystemExit(f"the chain doesn't run undisturbed:\n{said.text[-4000:]}")
            made_by.write_text(code)
            took.write_text(str(time.monotonic() - begun))
        return cls(chain=chain, seconds=float(took.read_text()), state=state_of(chain), code=code)


def code_of(root: Path) -> str:
    """Return the digest of the code and config that a chain copies."""
    files = [path for name in CODE for path in (root / name, *(root / name).rglob("*"))]
    files += [Path(__file__).with_name(name) for name in ("chain.py", *INJECTED)]
    files = [path for path in files if path.is_file() and path.suffix != ".pyc"]
    return digest_json({"config": CONFIG} | {str(path): digest_file(path) for path in files})


@dataclass(kw_only=True)
class Trial:
    """A trial, as a fault gets it.

    Attributes:
        drawn: random generator of this trial.
        instructions: messages that named a command, which the trial then ran.
        counts: other figures that the fault reports.
        hits: how often a strike hit something; None where it always does.
        targets: of Snakemake, whose results are then required; empty for all.
    """

    reference: Reference
    folder: Path
    point: str
    drawn: random.Random
    instructions: list[str] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)
    hits: int | None = None
    chain: Chain = field(init=False)
    targets: list[str] = field(default_factory=list)

    def having(self, stages: Iterable[str]) -> Chain:
        """Return a chain with the results of these stages alone, and compiled modules."""
        self.chain = self.reference.chain.copy_to(self.folder)
        self.chain.keep_only(stages)
        return self.chain

    def before(self, stage: str, *, to: str = "") -> Chain:
        """Return a chain with the results before a stage, aimed at that stage or a later one that reads it."""
        self.aim(to or stage)
        return self.having(STAGES[: STAGES.index(stage)])

    def until(self, stage: str) -> Chain:
        """Return a chain with the results up to a stage, aimed at all stages that read them."""
        self.aim(READ_BY[stage])
        return self.having(STAGES[: STAGES.index(stage) + 1])

    def aim(self, stage: str) -> None:
        """Limit the run to this stage; for the report, which reads no cards, run everything."""
        wanted = [f"results/{name}" for name in self.reference.state if name.split("/")[0] == stage]
        self.targets = [] if stage == STAGES[-1] else ["--", *wanted]

    def kill(self, running: subprocess.Popen, *, after: float) -> None:
        """Kill a run after so many seconds, unless it has ended by then."""
        try:
            running.wait(after)
        except subprocess.TimeoutExpired:
            self.hit(everything_in(self.chain.folder))
            self.chain.kill(running)

    def hit(self, struck: object) -> None:
        """Record whether a strike hit something."""
        self.hits = (self.hits or 0) + bool(struck)

    def check_message(self, said: Said, *, fails: bool | None = True) -> None:
        """Check the message of a run that meets the fault. Args: fails: whether the run must fail; None if it may."""
        check(said, ours_alone=True)
        if said.status != 0:
            self.instructions += [line for line in said.text.splitlines() if line.startswith("error: ")][-1:]
            self.counts["said"] = (self.instructions or [said.last_words])[-1]
        if fails is not None and fails != (said.status != 0):
            raise Failed(f"exit status {said.status} of the run that met the fault")

    def recover(self, *, unlock: bool, orders: dict[str, Any] | None = None) -> None:
        """Run again as the README and the messages say, until it succeeds; then compare.

        Args:
            unlock: whether Snakemake itself was killed.
            orders: faults that persist; see meddling.py.
        """
        self.chain.order(**(orders or {}))
        if unlock:
            check(self.chain.snakemake("--unlock", seconds=SECONDS, log="unlock.log"))
        for _ in range(RUNS_AGAIN):
            said = self.chain.snakemake(*self.targets, seconds=SECONDS)
            check(said)
            if said.status == 0:
                break
            self.follow(said)
        else:
            raise Failed(f"still not done after {RUNS_AGAIN} runs: {said.last_words}")
        self.compare()

    def follow(self, said: Said) -> None:
        """Remove what a message says to remove before the next run; Failed if it doesn't say what to do."""
        if rebuild := REBUILD.search(said.text):
            self.instructions.append(rebuild[0])
            (self.chain.folder / rebuild[1]).unlink(missing_ok=True)
        elif remove := REMOVE.search(said.text):
            self.instructions.append(remove[0])
            begins_with, named = remove.groups()
            path = self.chain.folder / (begins_with if named == "it" or named.startswith("the ") else named)
            path = path.parent if named == "the file's folder" else path
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif again := AGAIN.search(said.text):
            self.instructions.append(again[0].strip())
        else:
            errors = [line for line in said.text.splitlines() if "error: " in line or "Error" in line]
            raise Failed(f"no word of what to do: {(errors or [said.last_words])[-1]}")

    def compare(self) -> None:
        """Raise unless all results equal the undisturbed ones and no folder had two writers."""
        last = self.targets[1].split("/")[1] if self.targets else STAGES[-1]
        stages = STAGES[: STAGES.index(last) + 1]
        wanted = {name: state for name, state in self.reference.state.items() if name.split("/")[0] in stages}
        if differing := differences(wanted, state_of(self.chain)):
            raise Failed(f"other results: {'; '.join(differing[:4])}")
        if wrong := two_writers(self.chain):
            raise Failed(f"two writers: {wrong}")
        if self.hits == 0:
            raise Failed("nothing was there to be struck")


def check(said: Said, *, ours_alone: bool = False) -> None:
    """Raise if a run hung or printed a traceback.

    Args:
        ours_alone: one that Snakemake prints of itself doesn't count, as after a second Ctrl-C.
    """
    if said.status is None:
        raise Failed(f"no end within {SECONDS:.0f} s: {said.last_words}")
    for found in TRACEBACK.finditer(said.text):
        if not ours_alone or "/workflow/snaketune/" in found[1] or "/accelerate/" in found[1]:
            raise Failed(f"a traceback: {said.text[found.start() :].strip()[:1500]}")


def state_of(chain: Chain) -> dict[str, Any]:
    """Return the manifest of each published result and its damaged files; of the report, which contains times, its files."""
    found: dict[str, Any] = {}
    for name, manifest in chain.manifests().items():
        stage = name.split("/")[0]
        folder = (chain.results / name).parent / TABLE[stage].payload
        described = manifest["payload"] | manifest["records"]
        wrong = sorted(
            file
            for file, entry in described.items()
            if not (folder / file).is_file() or digest_file(folder / file) != entry["digest"]
        )
        found[name] = {"wrong": wrong, "manifest": {} if stage == "report" else manifest}
    return found


def differences(wanted: dict[str, Any], there: dict[str, Any]) -> list[str]:
    found = [f"{name} is missing" for name in sorted(wanted.keys() - there.keys())]
    found += [f"{name} was made besides" for name in sorted(there.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & there.keys()):
        if there[name]["wrong"]:
            found.append(f"{name}: not as it says: {', '.join(there[name]['wrong'])}")
        one, other = wanted[name]["manifest"], there[name]["manifest"]
        keys = sorted(one.keys() | other.keys())
        found += [f"{name}: {key} differs" for key in keys if one.get(key) != other.get(key)]
    return found


def two_writers(chain: Chain) -> str:
    """Return writes into a work folder after another attempt had begun to write there; empty if there are none."""
    if not chain.events.is_file():
        return ""
    last: dict[str, str] = {}
    done: dict[str, set[str]] = {}
    lines = [line for line in chain.events.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    for event in sorted(map(json.loads, lines), key=lambda event: event["at"]):
        who, path = event["who"], event["path"]
        inside = re.match(r"results/\.work/[^./][^/]*/[^/]+(?=/)", path)
        if not inside or CLAIMS.search(path):
            continue
        folder = inside[0]
        if who in done.setdefault(folder, set()):
            return f"{who} wrote {path} after {last[folder]} had begun to write there"
        if last.get(folder) not in (None, who):
            done[folder].add(last[folder])
        last[folder] = who
    return ""
