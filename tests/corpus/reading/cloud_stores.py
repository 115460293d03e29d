"""Stand-ins for the Hub, Google Cloud Storage and Azure: what their clients ask to list, identify and read files."""

import json
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import md5, sha1
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest

from .stores import BUCKET, running

MODIFIED = "Sat, 28 Nov 2026 07:00:00 GMT"


@dataclass
class HubServer:
    """A stand-in for the Hub with one dataset, `owner/name`, at the branch `main`. Attributes: files: content by path."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)


@contextmanager
def hub_server() -> Iterator[HubServer]:
    state = HubServer()
    with running(_HubAnswer, state):
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
    with running(_GoogleAnswer, state):
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


@dataclass
class AzureServer:
    """A stand-in for Azure's blobs with one container. Attributes: files: content by name."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)


@contextmanager
def azure_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[AzureServer]:
    """Run the stand-in, and set the environment in which adlfs finds it; skip if that isn't installed."""
    pytest.importorskip("adlfs", reason="adlfs isn't installed; the extra `dev` of pyproject.toml has it")
    state = AzureServer()
    with running(_AzureAnswer, state):
        key = b64encode(b"key-of-a-test").decode()
        connection = f"AccountName=account;AccountKey={key};BlobEndpoint={state.url}/account;"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"DefaultEndpointsProtocol=http;{connection}")
        yield state


class _AzureAnswer(BaseHTTPRequestHandler):
    state: AzureServer

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        asked = {key: values[0] for key, values in parse_qs(query).items()}
        name = unquote(path.removeprefix(f"/account/{BUCKET}").lstrip("/"))
        if asked.get("comp") == "list":
            self._send(self._listing(asked.get("prefix", ""), asked.get("delimiter")).encode(), 200)
        elif name in self.state.files:
            content = self.state.files[name]
            etag = {"ETag": f'"{md5(content).hexdigest()}"', "x-ms-blob-type": "BlockBlob", "Last-Modified": MODIFIED}
            if asked_range := self.headers.get("x-ms-range") or self.headers.get("Range"):
                first, last = (int(number) for number in asked_range.removeprefix("bytes=").split("-"))
                last = min(last, len(content) - 1)
                span = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
                self._send(content[first : last + 1], 206, etag | span)
            else:
                self._send(content, 200, etag)
        else:
            self._send(b"", 404, {"x-ms-error-code": "BlobNotFound"})

    def _listing(self, prefix: str, delimiter: str | None) -> str:
        names = [name for name in sorted(self.state.files) if name.startswith(prefix)]
        inner = [name for name in names if delimiter and delimiter in name.removeprefix(prefix)]
        folders = sorted({f"{prefix}{name.removeprefix(prefix).split('/')[0]}/" for name in inner})
        blobs = "".join(
            f"<Blob><Name>{name}</Name><Properties><Last-Modified>{MODIFIED}</Last-Modified>"
            f"<Etag>{md5(self.state.files[name]).hexdigest()}</Etag>"
            f"<Content-Length>{len(self.state.files[name])}</Content-Length><BlobType>BlockBlob</BlobType></Properties></Blob>"
            for name in names
            if name not in inner
        )
        blobs += "".join(f"<BlobPrefix><Name>{folder}</Name></BlobPrefix>" for folder in folders)
        return (
            f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName="{BUCKET}"><Blobs>{blobs}</Blobs>'
            "<NextMarker/></EnumerationResults>"
        )

    def _send(self, content: bytes, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/xml", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
