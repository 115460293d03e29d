"""resources/serve: the arguments of the two servers. Neither is run."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

SERVE = Path(__file__).parents[2] / "resources/serve"
HERE = ["--host", "127.0.0.1", "--port"]


@pytest.fixture
def called(tmp_path):
    """Run one of the scripts with servers that only print their arguments."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("vllm", "llama-server"):
        (tools / name).write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
        (tools / name).chmod(0o755)

    def call(script: str, *arguments: str, **environment: str) -> list[str]:
        variables = {"PATH": f"{tools}:{os.environ['PATH']}"} | environment
        done = subprocess.run([SERVE / script, *arguments], env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\0")[:-1]

    return call


def test_a_model_is_served_on_localhost_only(called):
    assert called("vllm.sh", "my model") == ["serve", "my model", *HERE, "8000"]
    assert called("vllm.sh", "m", "--max-model-len", "99", PORT="1") == [
        "serve",
        "m",
        *HERE,
        "1",
        "--max-model-len",
        "99",
    ]


@pytest.mark.parametrize(("rank", "max_rank"), [(4, "8"), (16, "16"), (48, "64")])
def test_an_adapter_is_served_on_its_base_with_a_sufficient_max_rank(called, tmp_path, rank, max_rank):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({"r": rank}))
    assert called("vllm.sh", str(tmp_path), BASE="Qwen/Qwen2.5-0.5B") == [
        "serve", "Qwen/Qwen2.5-0.5B", "--tokenizer", str(tmp_path), "--enable-lora", "--lora-modules",
        f"adapter={tmp_path}/adapter", "--max-lora-rank", max_rank, *HERE, "8000",
    ]  # fmt: skip


def test_a_gguf_file_is_served_with_its_own_chat_template(called):
    assert called("llama_server.sh", "a b.gguf", "-c", "512") == [
        "--model",
        "a b.gguf",
        "--jinja",
        *HERE,
        "8080",
        "-c",
        "512",
    ]


@pytest.mark.parametrize("script", ["vllm.sh", "llama_server.sh"])
def test_without_a_model_it_prints_what_to_name(script):
    assert (SERVE / script).stat().st_mode & stat.S_IXUSR
    done = subprocess.run([SERVE / script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "name a " in done.stderr
