"""A stand-in for the Hub: the few endpoints by which huggingface_hub pushes, over a store in memory."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_StandInStandInStandInStandIn"
# Files that the Hub stores outside git.
LARGE = (".safetensors", ".model", "tokenizer.json")


@dataclass
class Repository:
    """One repository: its commits, and its files by branch with their git or LFS digests."""

    private: bool
    branches: dict[str, dict[str, str]] = field(default_factory=lambda: {"main": {}})
    commits: list[dict[str, Any]] = field(default_factory=list)

    @property
    def sha(self) -> str:
        return hashlib.sha1(str(len(self.commits)).encode()).hexdigest()


class Hub:
    """The state of the stand-in.

    Attributes:
        objects: Uploads outside git by SHA-256; they stay when a push is killed.
        uploads: Their digests in the order of arrival.
        hold: All uploads but the first wait for this event.
        uploading: Set while an upload waits.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.uploads: list[str] = []
        self.hold, self.uploading = threading.Event(), threading.Event()
        self.hold.set()
        self.lock = threading.Lock()
        self.endpoint = ""


@contextmanager
def running() -> Iterator[Hub]:
    """Run a stand-in that listens on localhost."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Answer,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.hold.set()
        server.shutdown()
        thread.join()
        server.server_close()


def git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Answer(BaseHTTPRequestHandler):
    """The handler of one request."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        kind, owner, name, *revision = (*self.path.partition("?")[0].removeprefix("/api/").split("/"), "", "")[:5]
        repository = self.hub.repositories.get(f"{owner}/{name}")
        if kind != "models" or repository is None:
            self._respond(404, {"error": "not here"})
        elif self._is_authorized():
            files = repository.branches[revision[1] or "main"]
            siblings = [{"rfilename": file} for file in sorted(files)]
            self._respond(
                200,
                {"id": f"{owner}/{name}", "sha": repository.sha, "private": repository.private, "siblings": siblings},
            )

    def do_PUT(self) -> None:
        digest, content = self.path.rpartition("/")[2], self._read()
        with self.hub.lock:
            first = not self.hub.uploads and digest not in self.hub.objects
            if first or self.hub.hold.is_set():
                self._store(digest, content)
                return
        self.hub.uploading.set()
        self.hub.hold.wait(30)
        # The client may have been killed.
        self.close_connection = True

    def _store(self, digest: str, content: bytes) -> None:
        assert hashlib.sha256(content).hexdigest() == digest
        self.hub.objects[digest] = content
        self.hub.uploads.append(digest)
        self._respond(200, {})

    def do_POST(self) -> None:
        content = self._read()
        if not self._is_authorized():
            return
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[-1] == "batch":
            self._respond(200, {"objects": [self._batch(one) for one in json.loads(content)["objects"]]})
        elif parts[:2] == ["api", "validate-yaml"]:
            self._respond(200, {"errors": [], "warnings": []})
        elif parts[:3] == ["api", "repos", "create"]:
            self._create(json.loads(content))
        else:
            repository = self.hub.repositories["/".join(parts[2:4])]
            match parts[4]:
                case "preupload":
                    self._preupload(repository.branches[parts[5]], json.loads(content)["files"])
                case "branch":
                    status = 409 if parts[5] in repository.branches else 200
                    repository.branches.setdefault(parts[5], dict(repository.branches["main"]))
                    self._respond(status, {"error": "there already"} if status == 409 else {})
                case "commit":
                    self._commit(repository, "/".join(parts[2:4]), parts[5], content)

    def _create(self, request: dict[str, Any]) -> None:
        name = f"{request['organization']}/{request['name']}"
        url = f"{self.hub.endpoint}/{name}"
        if name in self.hub.repositories:
            self._respond(409, {"error": "there already", "url": url})
            return
        self.hub.repositories[name] = Repository(private=request["visibility"] == "private")
        self._respond(200, {"url": url, "name": name})

    def _preupload(self, files: dict[str, str], request: list[dict[str, Any]]) -> None:
        answer = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
                "oid": files.get(one["path"]),
            }
            for one in request
        ]
        self._respond(200, {"files": answer})

    def _batch(self, request: dict[str, Any]) -> dict[str, Any]:
        upload = {"upload": {"href": f"{self.hub.endpoint}/upload/{request['oid']}", "header": {}}}
        return request if request["oid"] in self.hub.objects else request | {"actions": upload}

    def _commit(self, repository: Repository, name: str, branch: str, content: bytes) -> None:
        files, lines = repository.branches[branch], [json.loads(line) for line in content.splitlines()]
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "file":
                    files[value["path"]] = git_digest(base64.b64decode(value["content"]))
                case "lfsFile":
                    assert value["oid"] in self.hub.objects
                    files[value["path"]] = value["oid"]
                case "deletedFile":
                    del files[value["path"]]
        repository.commits.append({"branch": branch, "lines": lines})
        url = f"{self.hub.endpoint}/{name}/commit/{repository.sha}"
        self._respond(200, {"success": True, "commitOid": repository.sha, "commitUrl": url})

    def _is_authorized(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        # A careless server, which echoes the token.
        self._respond(401, {"error": f"Invalid credentials: {self.headers.get('Authorization')}"})
        return False

    def _read(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _respond(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if "error" in answer:
            self.send_header("X-Error-Message", answer["error"])
        self.end_headers()
        self.wfile.write(content)
