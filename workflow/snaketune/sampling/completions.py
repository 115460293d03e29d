"""A client of servers with the completions interface of OpenAI (vLLM, SGLang, llama.cpp, `transformers serve`).

    prompt      token ids where the server takes them, else the text, if it encodes to the same ids
    tokens      the ids that the server returns (vLLM), else the response's text is encoded
    logp        of the returned tokens (vLLM), else None

Before anything is generated, the server's model and vocabulary are compared with what the config says. The
clients of openai and lm-eval know neither Unix sockets nor token ids in answers, and retry each request for itself.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from snaketune.config.generation import Decoding
from snaketune.errors import SnaketuneError, first_line, printable
from snaketune.progress import progress
from snaketune.sampling.replies import Reply
from snaketune.sampling.responses import Request, Response, cut, first_stop, tokens_in
from snaketune.servers.client import Damaged, ServerClient
from snaketune.tokenization.chat import ChatTokenizer

PATH = "/v1/completions"
# Its tokens differ between vocabularies: several scripts, digits, code, spaces.
PROBE = "The quick brown fox: 12345.67 kg, naïve café\n\tdef f(x): return x**2  # Привет, 你好, こんにちは 🦊"
# Fields that vLLM has besides those of OpenAI, with values that change nothing, whatever the model's generation_config says.
VLLM_FIELDS = {"return_token_ids": True, "ignore_eos": True, "repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0}


class Dialect(NamedTuple):
    """What a server understands: whether it has vLLM's fields and takes token ids, and whether it puts a token before texts."""

    vllm: bool
    ids: bool
    adds_bos: bool = False


@dataclass(kw_only=True)
class Completions:
    """Responses of a server.

    Args:
        url: the server's address.
        model_name: the name by which the server calls the model.
        dialect: what the server understands; by default it is found out, and its model and vocabulary are compared.
    """

    client: ServerClient[Request, Response]
    url: str
    model_name: str
    chat: ChatTokenizer
    decoding: Decoding
    dialect: Dialect | None = None
    # How the server calls the model in its answers; they may come from several replicas.
    _named: str | None = None

    def identity(self) -> dict[str, Any]:
        # Neither its address nor the code here: what was paid for stays when the server moves, and after edits of this package.
        return self.about()

    def about(self) -> dict[str, Any]:
        return {"name": "server", "model": self.model_name}

    def run(self) -> dict[str, Any]:
        return {"url": self.url, "usage": self.client.usage.about()}

    def generate(self, wanted: Sequence[Sequence[Request]]) -> Iterator[dict[bytes, Response]]:
        """Yield the responses to requests as they arrive.

        Raises:
            SnaketuneError: as of the client, or the server serves another model or vocabulary.
        """
        requests = [request for batch in wanted for request in batch]
        if not requests:
            return
        found: list[Dialect] = [self.dialect] if self.dialect else []

        async def prepare() -> None:
            if not found:
                print(f"prompts are sent to {self.url}", flush=True)
                found.append(await self.probe())

        arrived = self.client.answers(requests, lambda request: self._respond(request, found[0]), prepare)
        groups = ({request.digest: response for request, response in group} for group in arrived)
        yield from progress(groups, "generating", "responses", len(requests), len, tokens=tokens_in)

    async def probe(self) -> Dialect:
        """Find out what the server understands, and compare its model and vocabulary with ours."""
        served = await self._served()
        ids = self.chat.encode_text(PROBE).ids
        refused, dialect, found = "", Dialect(False, False), None
        for attempted in (Dialect(True, True), Dialect(False, True), dialect):
            prompt = ids if attempted.ids else PROBE
            found = await self.client.post(self._body(prompt, attempted, max_tokens=1, seed=0), PATH)
            if isinstance(found, dict):
                # Some servers take fields that they don't know, and ignore them.
                choices = found.get("choices")
                returns_ids = isinstance(choices, list) and any(
                    isinstance(c, dict) and c.get("token_ids") for c in choices
                )
                dialect = Dialect(attempted.vllm and returns_ids, attempted.ids)
                break
            refused = found
        if not isinstance(found, dict):
            names = f"; it serves {', '.join(served)}" if served else ""
            raise SnaketuneError(f"{self.url} refuses completions of {self.model_name!r}: {refused}{names}")
        if not dialect.vllm and self.decoding.repetition_penalty != 1.0:
            raise SnaketuneError(
                f"{self.url} has no field that is known for generation.repetition_penalty; remove it, or use vLLM"
            )
        name = found.get("model")
        self._named = name if isinstance(name, str) else None
        named = str(self._named)
        # `NAME@REVISION` is how the server of transformers calls a model.
        if self.model_name not in served and not (
            named.startswith(f"{self.model_name}@") or (not served and named == self.model_name)
        ):
            raise SnaketuneError(
                f"{self.url} serves {', '.join(served) or named}, and not {self.model_name!r}; name one of them "
                "under operation.engine.model"
            )
        adds_bos, checked = await self._compare_vocabulary(ids, dialect, found)
        how = "token ids" if dialect.ids else "text"
        print(f"{self.url} takes {how}; its vocabulary, compared with ours: {checked}", flush=True)
        return dialect._replace(adds_bos=adds_bos)

    async def _compare_vocabulary(self, ids: list[int], dialect: Dialect, reply: dict[str, Any]) -> tuple[bool, str]:
        """Whether the server puts a token before texts, and how its vocabulary was compared with ours."""
        body = {"model": self.model_name, "prompt": PROBE, "content": PROBE}
        found = await self.client.post(body | {"add_special_tokens": False, "add_special": False}, "/tokenize")
        if isinstance(found, dict) and isinstance(found.get("tokens"), list):
            if found["tokens"] != ids:
                raise self._other_vocabulary(f"it encodes {PROBE[:20]!r}… to {found['tokens'][:8]}…, not {ids[:8]}…")
            if dialect.ids:
                return False, "equal"
        if dialect.ids:
            text_reply = await self.client.post(self._body(PROBE, dialect, max_tokens=1, seed=0), PATH)
            reply = text_reply if isinstance(text_reply, dict) else {}
        usage = reply.get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if not isinstance(count, int):
            return False, "unknown, as it reports no number of tokens"
        if count not in (len(ids), len(ids) + 1):
            raise self._other_vocabulary(f"it encodes a text to {count} tokens, not {len(ids)}")
        return count > len(ids), "equal number of tokens"

    def _other_vocabulary(self, why: str) -> SnaketuneError:
        return SnaketuneError(
            f"{self.url}: {self.model_name} has another vocabulary than the tokenizer of this model ({why}); serve "
            "the model with its own tokenizer"
        )

    async def _respond(self, request: Request, dialect: Dialect) -> Response:
        prompt = request.prompt.tolist() if dialect.ids else self._text(request.prompt, dialect)
        seed = int.from_bytes(request.seed(self.decoding.seed)[:4], "little") >> 1
        body = self._body(prompt, dialect, max_tokens=self.decoding.max_new_tokens, seed=seed)

        async def ask() -> Response:
            return self._read(self.client.json(await self.client.sent(PATH, body)), request)

        return await self.client.tried(ask)

    def _read(self, content: dict[str, Any], request: Request) -> Response:
        """The response in an answer; raises Damaged if it isn't one finished response."""
        try:
            reply = Reply.model_validate(content)
            reply.choices[0].text.encode()
        except (ValidationError, UnicodeEncodeError) as error:
            found = printable(str(content.get("choices")))[:200]
            raise Damaged(f"it answered {found}, which isn't one finished response ({first_line(error)})") from None
        expected = self.model_name if self.dialect else self._named
        if reply.model != expected:
            raise SnaketuneError(f"{self.url} answered as {reply.model}, not as {expected}")
        count = reply.prompt_tokens
        if count is not None and count != len(request.prompt):
            raise self._other_vocabulary(f"a prompt of {len(request.prompt)} tokens has {count} there")
        (choice,) = reply.choices
        text, ended, tokens, logp = choice.text, choice.finish_reason, choice.token_ids, None
        if tokens is None:
            text = text[: first_stop(text, self.decoding.stop)]
            return Response(text, self.chat.encode_text(text).ids, ended, None)
        if len(tokens) > self.decoding.max_new_tokens or max(tokens, default=0) >= self.chat.vocab_size:
            raise Damaged(
                f"it answered {len(tokens)} tokens, up to {max(tokens, default=0)}, which can't be a response"
            )
        # Cut like the responses of other engines.
        text, length, _ = cut(tokens, self.chat.decode, self.decoding.stop)
        logps = ((choice.logprobs and choice.logprobs.token_logprobs) or [])[:length]
        known = [value for value in logps if value is not None]
        if len(known) == length:
            logp = math.fsum(known)
        return Response(text, tokens[:length], ended, logp)

    def _body(self, prompt: list[int] | str, dialect: Dialect, *, max_tokens: int, seed: int) -> dict[str, Any]:
        decoding, stops = self.decoding, list(self.decoding.stop)
        fields: dict[str, Any] = {"model": self.model_name, "prompt": prompt, "max_tokens": max_tokens}
        fields |= {"temperature": decoding.temperature, "top_p": decoding.top_p, "seed": seed}
        if dialect.vllm:
            fields |= VLLM_FIELDS | {"stop_token_ids": list(self.chat.stop_ids), "logprobs": 0}
        else:
            stops += [self.chat.text([token]) for token in self.chat.stop_ids]
        if decoding.top_k:
            fields["top_k"] = decoding.top_k
        if decoding.repetition_penalty != 1.0:
            fields["repetition_penalty"] = decoding.repetition_penalty
        return fields | ({"stop": stops} if stops else {})

    def _text(self, prompt: np.ndarray, dialect: Dialect) -> str:
        """The text of a prompt for a server that takes no ids."""
        ids = prompt.tolist()
        text = self.chat.text(ids)
        if self.chat.encode_text(text).ids != ids:
            raise SnaketuneError(
                f"{self.url} takes no token ids, and a prompt's text has other tokens when it is encoded again "
                f"({printable(text)[:80]!r}); use a server that takes ids, such as vLLM"
            )
        if not dialect.adds_bos:
            return text
        bos = self.chat.template.variables.get("bos_token")
        if not bos or not text.startswith(bos):
            raise SnaketuneError(
                f"{self.url} takes no token ids and puts a token before each text, which the chat template doesn't "
                "write; use a server that takes ids, such as vLLM"
            )
        return text.removeprefix(bos)

    async def _served(self) -> list[str]:
        """The names of the models that the server lists; empty if it can't."""
        try:
            listed = (await self.client.get("/v1/models")).json()["data"]
            return [str(entry["id"]) for entry in listed]
        except (ValueError, LookupError, TypeError):
            return []
