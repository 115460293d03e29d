"""Which engine generates: the choice of the config, resolved on the machine of the job, and made ready."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base_models import Pretrained
from snaketune.config.generation import Decoding, Server
from snaketune.config.generation import Engine as EngineName
from snaketune.config.operation import Execution
from snaketune.engine.model.attention import use_own_attention
from snaketune.engine.model.devices import Compute, use_threads
from snaketune.errors import SnaketuneError
from snaketune.models.adapter_stack import ADAPTER, AdapterStack, is_adapter_only
from snaketune.models.load_model import read_config, set_special_tokens
from snaketune.sampling.completions import Completions
from snaketune.sampling.generation_check import choose_generation_mode
from snaketune.sampling.responses import Engine, Request, Response, ResponseCache, key_parts
from snaketune.sampling.transformers_engine import TransformersEngine
from snaketune.sampling.vllm_engine import ADVICE, ServedModel, VllmEngine, adapter_rank, find_vllm
from snaketune.servers.client import ServerClient, connection
from snaketune.servers.usage import Usage
from snaketune.stages.cache.code_digest import code_digest
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.tokenization.chat import ChatTokenizer


def resolve(engine: EngineName, environment: str | None, device: str) -> EngineName:
    """The engine that `auto` stands for here, else the one that is named.

    Args:
        environment: folder of vLLM's environment, if the config names one.
        device: `cuda`, `cpu` or `mps`.
    Raises:
        SnaketuneError: vLLM is named, and isn't there.
    """
    if engine not in ("auto", "vllm"):
        return engine
    if engine == "auto" and device != "cuda":
        print("operation.engine: auto is transformers here, as there is no GPU", flush=True)
        return "transformers"
    found = find_vllm(environment)
    if not found and (engine == "vllm" or environment):
        raise SnaketuneError(
            f"operation.engine: {engine}, but {environment or 'this environment'} has no vLLM; {ADVICE}"
        )
    if engine == "vllm":
        return "vllm"
    if not found:
        print(f"operation.engine: auto is transformers here, as vLLM isn't found: {ADVICE}", flush=True)
        return "transformers"
    print(f"operation.engine: auto is vLLM here, that of {found}", flush=True)
    return "vllm"


@dataclass(frozen=True, kw_only=True)
class ServerEngine:
    """Generation by a server that the config names."""

    server: Server
    completions: Completions

    def identity(self) -> dict[str, Any]:
        # Not its address: what was answered stays when the server moves.
        return self.about() | {"code": code_digest("snaketune.sampling.completions")}

    def about(self) -> dict[str, Any]:
        return {"name": "server", "model": self.server.model}

    def run(self) -> dict[str, Any]:
        return {"url": self.server.url, "usage": self.completions.client.usage.about()}

    def generate(self, wanted: Sequence[Sequence[Request]]) -> Iterator[dict[bytes, Response]]:
        if wanted:
            print(f"prompts are sent to {self.server.url}", flush=True)
            yield from self.completions.generate(wanted)


def server_engine(
    engine: EngineName,
    *,
    environment: str | None,
    stack: AdapterStack,
    tokenizer: Artifact,
    chat: ChatTokenizer,
    decoding: Decoding,
    compute: Compute,
    frozen: bool,
    gpus: int,
    longest: int,
    work: WorkFolder,
) -> Engine:
    """The engine `vllm`, or a server's.

    Args:
        frozen: as in `RefLogpsSpec.frozen_weights`.
        longest: tokens of the longest prompt with its response.
    """
    if isinstance(engine, Server):
        client = ServerClient[Request, Response](
            connect=connection(engine), usage=Usage.of(engine, work.state / "usage.json")
        )
        completions = Completions(client=client, model_name=engine.model, chat=chat, decoding=decoding)
        return ServerEngine(server=engine, completions=completions)
    python = find_vllm(environment)
    if not python:
        raise SnaketuneError(f"operation.engine: vllm, but {environment or 'this environment'} has no vLLM; {ADVICE}")
    dtype = str(compute.dtype).removeprefix("torch.")
    return VllmEngine(
        python=python,
        served=_served_model(stack, chat, compute, frozen, work),
        chat=chat,
        tokenizer=tokenizer.folder,
        decoding=decoding,
        dtype=dtype,
        device=compute.device.type,
        frozen=frozen,
        gpus=gpus,
        longest=longest,
    )


def _served_model(
    stack: AdapterStack, chat: ChatTokenizer, compute: Compute, frozen: bool, work: WorkFolder
) -> Callable[[], ServedModel]:
    """What assembles the model that vLLM loads: the result's own folder; the base with the adapter of the result, unmerged; or
    a copy in the work folder, where vLLM can't load either."""

    def served() -> ServedModel:
        top = stack.results[:1]
        for result in stack.results:
            result.files()
        if top and not is_adapter_only(top[0]):
            return ServedModel(base=Pretrained(path=str(top[0].folder), trust_remote_code=stack.trust_remote_code))
        below = stack.weights
        # With an embedding for each token, and its own positions.
        plain = below is not None and below.rope is None
        plain = plain and read_config(below).get_text_config().vocab_size >= chat.vocab_size
        if plain and not top:
            return ServedModel(base=below)
        one_adapter = len([result for result in stack.results if is_adapter_only(result)]) == 1
        if plain and one_adapter and (rank := adapter_rank(top[0].folder / ADAPTER)):
            return ServedModel(base=below, adapter=top[0].folder / ADAPTER, rank=rank)
        folder = work.state / "served-model"
        print(f"vLLM is given a copy of the model with its adapters merged, in {folder}", flush=True)
        model = stack.load(compute.weights_dtype(frozen=frozen))
        set_special_tokens(model, chat)
        model.save_pretrained(folder)
        return ServedModel(base=Pretrained(path=str(folder), trust_remote_code=stack.trust_remote_code))

    return served


def response_cache(
    name: EngineName,
    *,
    stack: AdapterStack,
    tokenizer: Artifact,
    chat: ChatTokenizer,
    compute: Compute,
    decoding: Decoding,
    frozen: bool,
    base_files: Sequence[Path],
    operation: Execution,
    longest: int,
    work: WorkFolder,
) -> ResponseCache:
    """The cache of a model's responses, with its engine.

    Args:
        name: of an engine, as `resolve` returns it.
        frozen, longest: as in `server_engine`.
    Raises:
        SnaketuneError: the engine isn't there.
    """
    if name == "transformers":
        engine: Engine = _transformers_engine(stack, chat, compute, decoding, frozen)
    else:
        engine = server_engine(
            name,
            environment=operation.vllm,
            stack=stack,
            tokenizer=tokenizer,
            chat=chat,
            decoding=decoding,
            compute=compute,
            frozen=frozen,
            gpus=operation.gpus,
            longest=longest,
            work=work,
        )
    parts = key_parts(
        results=stack.results,
        base=stack.base,
        base_files=base_files,
        tokenizer=tokenizer,
        decoding=decoding,
        work_root=work.root,
    )
    return ResponseCache(work, engine, parts)


def _transformers_engine(
    stack: AdapterStack, chat: ChatTokenizer, compute: Compute, decoding: Decoding, frozen: bool
) -> TransformersEngine:
    loaded = stack.load(compute.weights_dtype(frozen=frozen))
    set_special_tokens(loaded, chat)
    loaded = loaded.to(compute.device)
    use_threads(loaded.config, compute)
    # Before the model's own attention is replaced.
    mode = choose_generation_mode(loaded, chat, compute)
    use_own_attention(loaded)
    return TransformersEngine(model=loaded, chat=chat, compute=compute, mode=mode, decoding=decoding)
