"""A fake Kubernetes cluster: the part of its API that Snakemake's executor uses, with local processes as pods.

As in a cluster, a job starts in an empty folder, with the image's programs and environment and none of the caller's. Unlike in
one, volumes have the paths of this machine, whatever a pod mounts. Requests are retained, for tests to inspect.
"""

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import yaml


class Cluster:
    """One namespace: the requested jobs by name, and their processes."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.jobs: dict[str, dict[str, Any]] = {}
        self.processes: dict[str, subprocess.Popen] = {}

    def create(self, job: dict[str, Any]) -> None:
        name = job["metadata"]["name"]
        (container,) = job["spec"]["template"]["spec"]["containers"]
        pod = self.folder / name
        pod.mkdir(parents=True)
        self.jobs[name] = job
        with (self.folder / f"{name}.log").open("w", encoding="utf-8") as log:
            self.processes[name] = subprocess.Popen(
                [*container["command"], *container["args"]],
                cwd=pod, stdout=log, stderr=log,
                env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(pod), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def status(self, name: str) -> dict[str, int]:
        ended = self.processes[name].poll()
        return {"active": 1} if ended is None else {"succeeded": 1} if ended == 0 else {"failed": 1}

    def logs(self) -> str:
        return "\n".join(path.read_text(encoding="utf-8") for path in sorted(self.folder.glob("*.log")))


def start(folder: Path) -> tuple[Cluster, Path]:
    """A cluster, and the file by which its clients find it (KUBECONFIG)."""
    cluster = Cluster(folder / "pods")

    class Handler(BaseHTTPRequestHandler):
        def answer(self, content: dict[str, Any]) -> None:
            text = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_POST(self):
            requested = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.endswith("/jobs"):
                cluster.create(requested)
            self.answer(requested)

        def do_GET(self):
            parts = self.path.split("/")
            self.answer({"status": cluster.status(parts[-2])} if parts[-1] == "status" else {"items": []})

        def do_DELETE(self):
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            self.answer({})

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    result = {"apiVersion": "v1", "kind": "Config", "current-context": "here"}
    result["contexts"] = [{"name": "here", "context": {"cluster": "here", "user": "me"}}]
    result["clusters"] = [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}]
    result["users"] = [{"name": "me", "user": {}}]
    config = folder / "kubeconfig"
    config.write_text(yaml.safe_dump(result), encoding="utf-8")
    return cluster, config
