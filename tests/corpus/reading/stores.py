"""Stores for tests: moto's S3, and a web server whose answers can be damaged."""

import json
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import md5, sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote
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
    with _running(_Answer, state):
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


@dataclass
class HubServer:
    """A stand-in for the Hub with one dataset, `owner/name`, at the branch `main`. Attributes: files: content by path."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)


@contextmanager
def hub_server() -> Iterator[HubServer]:
    state = HubServer()
    with _running(_HubAnswer, state):
        yield state


class _HubAnswer(BaseHTTPRequestHandler):
    state: HubServer

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        path, files = unquote(path), self.state.files
        if path.startswith("/api/datasets/owner/name/revision/main"):
            self._respond({"id": "owner/name", "sha": "0" * 40, "siblings": []})
        elif path.startswith(prefix := "/api/datasets/owner/name/tree/main"):
            folder = path.removeprefix(prefix).strip("/")
            below = {
                name: content for name, content in files.items() if name.startswith(f"{folder}/" if folder else "")
            }
            entries: dict[str, dict[str, Any]] = {}
            for name, content in below.items():
                rest = name.removeprefix(f"{folder}/" if folder else "").split("/")
                for depth in range(1, len(rest)):
                    inner = "/".join([*filter(None, [folder]), *rest[:depth]])
                    entries[inner] = {"type": "directory", "path": inner, "oid": "0" * 40, "size": 0}
                oid = sha1(content).hexdigest()
                entries[name] = {"type": "file", "path": name, "oid": oid, "size": len(content)}
            deep = "recursive=true" in query.lower() or "recursive=1" in query
            depth = folder.count("/") + 1 if folder else 0
            shown = [entry for name, entry in entries.items() if deep or name.count("/") == depth]
            self._respond(shown) if entries else self._respond({"error": "none"}, 404)
        elif path.startswith(prefix := "/datasets/owner/name/resolve/main/") and path.removeprefix(prefix) in files:
            content = files[path.removeprefix(prefix)]
            first, last = 0, len(content) - 1
            if asked := self.headers.get("Range"):
                first, last = (int(number) for number in asked.removeprefix("bytes=").split("-"))
            self._send(content[first : last + 1], 206 if asked else 200)
        else:
            self._respond({"error": "none"}, 404)

    def _respond(self, answer: Any, status: int = 200) -> None:
        self._send(json.dumps(answer).encode(), status)

    def _send(self, content: bytes, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound" if "name" in self.path else "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@dataclass
class GoogleServer:
    """A stand-in for Google Cloud Storage with one bucket. Attributes: files: content by key."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)


@contextmanager
def google_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleServer]:
    """Run the stand-in, and set the environment in which gcsfs finds it; skip if that isn't installed."""
    pytest.importorskip("gcsfs", reason="gcsfs isn't installed; the extra `dev` of pyproject.toml has it")
    state = GoogleServer()
    with _running(_GoogleAnswer, state):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", state.url)
        yield state


class _GoogleAnswer(BaseHTTPRequestHandler):
    state: GoogleServer

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        below, asked = f"/storage/v1/b/{BUCKET}/o", {key: values[0] for key, values in parse_qs(query).items()}
        key = unquote(path.rpartition(f"{below}/")[2])
        if path.startswith("/download") or asked.get("alt") == "media":
            first, last = (int(number) for number in self.headers["Range"].removeprefix("bytes=").split("-"))
            self._send(self.state.files[key][first : last + 1], 206)
        elif path == below:
            prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter")
            names = [name for name in sorted(self.state.files) if name.startswith(prefix)]
            inner = [name for name in names if delimiter and delimiter in name.removeprefix(prefix)]
            folders = {f"{prefix}{name.removeprefix(prefix).split('/')[0]}/" for name in inner}
            items = [self._entry(name) for name in names if name not in inner]
            self._send(json.dumps({"items": items, "prefixes": sorted(folders)}).encode(), 200)
        elif key in self.state.files:
            self._send(json.dumps(self._entry(key)).encode(), 200)
        else:
            self._send(b'{"error": {"code": 404, "message": "none"}}', 404)

    def _entry(self, key: str) -> dict[str, Any]:
        content = self.state.files[key]
        digest = b64encode(md5(content).digest()).decode()
        return {"name": key, "bucket": BUCKET, "size": str(len(content)), "md5Hash": digest, "generation": "1"}

    def _send(self, content: bytes, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def _running(handler: type[BaseHTTPRequestHandler], state: Any) -> Iterator[None]:
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
