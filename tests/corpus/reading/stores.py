"""Stores for tests: moto's S3, and a web server whose answers can be damaged."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import Request, urlopen

import pytest

from snaketune import locations, remote_files

BUCKET = "rows"


@dataclass
class ObjectStore:
    """moto's server with one bucket."""

    client: Any
    url: str = f"s3://{BUCKET}/"

    def write(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def remove(self, key: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=key)


def forget_stores() -> None:
    """Forget what is known of stores, what was read, and the clients with their credentials."""
    locations.forget()
    locations._filesystem_of.cache_clear()
    remote_files._head.cache_clear()


@contextmanager
def moto_server() -> Iterator[str]:
    """Run moto's server, and yield its URL; skip if a package for it isn't installed."""
    for package in ("moto.server", "flask", "s3fs", "boto3"):
        name = package.partition(".")[0]
        pytest.importorskip(package, reason=f"{name} isn't installed; the extra `dev` of pyproject.toml has it")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def object_store(url: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Empty moto's server, and set the environment in which clients find it."""
    import boto3

    with urlopen(Request(f"{url}/moto-api/reset", method="POST")):
        pass
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key-of-a-test",
        "AWS_SECRET_ACCESS_KEY": "secret-of-a-test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    return ObjectStore(client)


@dataclass
class WebServer:
    """A web server.

    Attributes:
        files: content by path.
        identifies, sends_parts, states_length: whether it sends an ETag, answers to ranges, and sends the length.
        cut_off: number of bytes after which it ends a transfer.
        status: of all answers.
        requests: method, path and range of each request.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    identifies: bool = True
    sends_parts: bool = True
    states_length: bool = True
    cut_off: int | None = None
    status: int = 200
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)


@contextmanager
def web_server() -> Iterator[WebServer]:
    state = WebServer()
    with running(_Answer, state):
        yield state


class _Answer(BaseHTTPRequestHandler):
    state: WebServer

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        state, asked = self.state, self.headers.get("Range")
        state.requests.append((self.command, self.path, asked))
        content = state.files.get(self.path)
        if content is None or state.status != 200:
            self.send_response(404 if content is None else state.status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        first, last = 0, len(content) - 1
        if asked and state.sends_parts:
            first, last = (int(number) for number in asked.removeprefix("bytes=").split("-"))
            last = min(last, len(content) - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        else:
            self.send_response(200)
        if state.identifies:
            self.send_header("ETag", f'"{md5(content).hexdigest()}"')
        if state.states_length:
            self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if body:
            end = last + 1 if state.cut_off is None else min(last + 1, state.cut_off)
            self.wfile.write(content[first:end])


@contextmanager
def running(handler: type[BaseHTTPRequestHandler], state: Any) -> Iterator[None]:
    """Run a server, whose address becomes the state's `url`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (handler,), {"state": state}))
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
