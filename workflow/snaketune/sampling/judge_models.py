"""Models that answer a judge's questions: a chat model of a server, or a model of the config. Replies are kept by content.

A server's reply is kept by the request that it answers, word for word, so no edit of this package asks a paid question again.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from pydantic import ValidationError

from snaketune.artifacts.manifest import Artifact
from snaketune.config.generation import Decoding, Server
from snaketune.config.generation import Engine as EngineName
from snaketune.config.operation import Execution
from snaketune.errors import first_line, printable
from snaketune.models.load_model import positions_of
from snaketune.progress import progress
from snaketune.sampling.engines import engine_of, resolve
from snaketune.sampling.replies import ChatReply
from snaketune.sampling.responses import Request, ResponseCache, batches
from snaketune.sampling.sampled import Sampled
from snaketune.servers.client import Damaged, DamagedAnswer, ServerClient, connection
from snaketune.servers.usage import Usage
from snaketune.stages.cache.row_store import RowStore
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.host.locks import locked
from snaketune.stages.specs import JudgeModelSpec
from snaketune.tokenization.template import Refused

PATH = "/v1/chat/completions"
# Statuses by which a server refuses one question.
REFUSED = (400, 413, 422)
# Tokens of the turns that ask for a readable reply, at most.
REMINDER = 200
# A question: the turns of a chat, the last one the user's.
Question = list[dict[str, str]]


class Answer(NamedTuple):
    """A judge's reply, and whether it is complete."""

    text: str
    complete: bool


class JudgeModel(Protocol):
    """What answers questions."""

    def ask(self, questions: Sequence[Question]) -> list[Answer | None]:
        """The replies, in the order of the questions; None where there is none."""

    def about(self) -> dict[str, Any]:
        """For the manifest: the judge, and the keys of its kept replies."""

    def run(self) -> dict[str, Any]:
        """For run.json: what was asked."""


@dataclass(kw_only=True)
class ServerJudge:
    """A chat model of a server. Args: schema: of the JSON object that a reply is; None for text."""

    server: Server
    client: ServerClient[bytes, Answer | None]
    rows: RowStore
    max_new_tokens: int
    schema: dict[str, Any] | None = None
    _takes_schemas: bool = True
    _said: set[str] = field(default_factory=set)

    def ask(self, questions: Sequence[Question]) -> list[Answer | None]:
        bodies = [self._body(question) for question in questions]
        digests = [hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()[:16] for body in bodies]
        by_digest = dict(zip(digests, bodies, strict=True))
        # Of two jobs with the same questions, one asks.
        with locked(self.rows.folder / ".lock", "the replies of this judge"):
            rows, _ = self.rows.completed(digests, lambda missing: self._asked(by_digest, missing), "replies")
        return [Answer(*rows[digest]) if digest in rows else None for digest in digests]

    def about(self) -> dict[str, Any]:
        return {"judge": {"name": "server", "model": self.server.model}, "rows": [self.rows.key]}

    def run(self) -> dict[str, Any]:
        return {"url": self.server.url, "usage": self.client.usage.about()}

    def _asked(self, bodies: dict[bytes, dict[str, Any]], missing: Sequence[bytes]) -> Iterator[dict[bytes, Answer]]:
        print(f"what is judged is sent to {self.server.url}", flush=True)
        arrived = self.client.answers(missing, lambda digest: self._respond(bodies[digest]), _nothing)
        for group in progress(arrived, "judging", "replies", len(missing), len):
            yield {digest: answer for digest, answer in group if answer is not None}

    async def _respond(self, body: dict[str, Any]) -> Answer | None:
        """The answer; None if the server refuses this question, or damages each answer to it."""

        async def ask() -> Answer | None:
            with_schema = self._takes_schemas and self.schema is not None
            reply = await self.client.sent(PATH, body if with_schema else _without_schema(body))
            if reply.status_code in REFUSED and with_schema:
                self._say(f"{self.server.url} takes no JSON schema: {self.client.printable_text(reply)}")
                self._takes_schemas = False
                reply = await self.client.sent(PATH, _without_schema(body))
            # One question may be too long for it, or not to its liking.
            if reply.status_code in REFUSED:
                self._say(f"{self.server.url} refuses a question: {self.client.printable_text(reply)}")
                return None
            return _answer(self.client.json(reply))

        try:
            return await self.client.tried(ask)
        except DamagedAnswer as error:
            self._say(str(error))
            return None

    def _say(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            print(why, flush=True)

    def _body(self, question: Question) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.server.model, "messages": question, "temperature": 0}
        if self.schema:
            schema = {"name": "judgement", "schema": self.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body | {"max_tokens": self.max_new_tokens}


def _without_schema(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != "response_format"}


def _answer(value: dict[str, Any]) -> Answer:
    try:
        (choice,) = ChatReply.model_validate(value).choices
    except ValidationError as error:
        found = printable(str(value.get("choices")))[:200]
        raise Damaged(f"it answered {found}, which isn't one reply ({first_line(error)})") from None
    # A lone surrogate can't be written to a table.
    text = (choice.message.content or "").encode(errors="replace").decode()
    return Answer(text, complete=choice.finish_reason != "length")


async def _nothing() -> None:
    pass


@dataclass(kw_only=True)
class ModelJudge:
    """A model of the config. Args: name: of its engine; positions: tokens of a question and its reply, at most."""

    sampled: Sampled
    name: EngineName
    batch_size: int
    positions: int
    _cache: ResponseCache | None = None
    _generated: int = 0

    def ask(self, questions: Sequence[Question]) -> list[Answer | None]:
        encoded = [self._encoded(question) for question in questions]
        wanted = batches([ids for ids in encoded if ids is not None], 1, self.batch_size)
        if self._cache is None:
            # A question that is asked again has the reply, too.
            needed = max((len(ids) for ids in encoded if ids is not None), default=0)
            needed += 2 * self.sampled.decoding.max_new_tokens + REMINDER
            self._cache = self.sampled.cache(engine_of(self.name, self.sampled, min(needed, self.positions)))
        generated, _ = self._cache.complete(wanted)
        self._generated += generated
        found = [None if ids is None else self._cache.known[Request(ids).digest] for ids in encoded]
        return [response and Answer(response.text, complete=response.ended == "stop") for response in found]

    def about(self) -> dict[str, Any]:
        if self._cache is None:
            return {"judge": {"name": str(self.name)}}
        return {"judge": self._cache.engine.about(), "rows": [self._cache.rows.key]}

    def run(self) -> dict[str, Any]:
        return {"responses_generated": self._generated}

    def _encoded(self, question: Question) -> np.ndarray | None:
        try:
            ids = self.sampled.chat.encode_prompt(question)
        except Refused as reason:
            print(f"not judged: {reason}", flush=True)
            return None
        longest = self.positions - self.sampled.decoding.max_new_tokens
        if len(ids) > longest:
            print(f"not judged: a question has {len(ids)} tokens, and the judge takes {longest}", flush=True)
            return None
        return ids


def judge_of(
    spec: JudgeModelSpec,
    work: WorkFolder,
    *,
    tokenizer: Sequence[Artifact],
    results: tuple[Artifact, ...],
    base_files: Sequence[Path],
    operation: Execution,
    schema: dict[str, Any] | None = None,
) -> JudgeModel:
    """The judge of a job. Args: results: the model's result and its base layers."""
    if isinstance(operation.engine, Server):
        server = operation.engine
        rows = RowStore(work.root, {"judge": "chat completions", "model": server.model})
        rows.must_keep = True
        rows.mark(work)
        usage = Usage.of(server, work.state / "usage.json")
        return ServerJudge(
            server=server,
            client=ServerClient(connect=connection(server, "judge.engine"), usage=usage),
            rows=rows,
            max_new_tokens=spec.max_new_tokens,
            schema=schema,
        )
    sampled = Sampled(
        results=results,
        base=spec.base,
        trust_remote_code=spec.trust_remote_code,
        tokenizer=tokenizer[0],
        decoding=Decoding(max_new_tokens=spec.max_new_tokens),
        frozen=spec.frozen_weights,
        base_files=base_files,
        operation=operation,
        work=work,
    )
    name = resolve(operation.engine, operation.vllm, sampled.compute.device.type)
    config = sampled.stack.config() or sampled.stack.new_config()
    positions = (config and positions_of(config)) or sys.maxsize
    return ModelJudge(sampled=sampled, name=name, batch_size=spec.batch_size, positions=positions)
