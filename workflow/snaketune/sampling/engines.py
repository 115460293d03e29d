"""Which engine generates: the choice of the config, resolved on the machine of the job, and made ready."""

from snaketune.config.generation import Engine as EngineName
from snaketune.config.generation import Server
from snaketune.engine.model.attention import use_own_attention
from snaketune.engine.model.devices import use_threads
from snaketune.errors import SnaketuneError
from snaketune.sampling.completions import Completions
from snaketune.sampling.generation_check import choose_generation_mode
from snaketune.sampling.responses import Engine, Request, Response
from snaketune.sampling.sampled import Sampled
from snaketune.sampling.transformers_engine import TransformersEngine
from snaketune.sampling.vllm_engine import ADVICE, VllmEngine, find_vllm
from snaketune.servers.client import ServerClient, connection
from snaketune.servers.usage import Usage


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


def engine_of(name: EngineName, sampled: Sampled, longest: int) -> Engine:
    """An engine that is ready to generate.

    Args:
        name: as `resolve` returns it.
        longest: tokens of the longest prompt with its response.
    """
    operation, compute = sampled.operation, sampled.compute
    if isinstance(name, Server):
        client = ServerClient[Request, Response](
            connect=connection(name), usage=Usage.of(name, sampled.work.state / "usage.json")
        )
        return Completions(
            client=client, url=name.url, model_name=name.model, chat=sampled.chat, decoding=sampled.decoding
        )
    if name == "vllm":
        python = find_vllm(operation.vllm)
        assert python
        return VllmEngine(python=python, sampled=sampled, longest=longest)
    loaded = sampled.on_device()
    use_threads(loaded.config, compute)
    # Before the model's own attention is replaced.
    mode = choose_generation_mode(loaded, sampled.chat, compute)
    use_own_attention(loaded)
    return TransformersEngine(model=loaded, chat=sampled.chat, compute=compute, mode=mode, decoding=sampled.decoding)
