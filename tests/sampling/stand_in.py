"""A stand-in for a server with the completions interface, which fails in the ways that a test names."""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from snaketune.tokenization.chat import ChatTokenizer

MODEL = "tuned"
# What a choice may be, and isn't a response.
DAMAGED_REPLIES: dict[str, dict[str, Any]] = {
    "ids-beyond": {"token_ids": [2**31]},
    "ids-of-others": {"token_ids": [70_000]},
    "too-many": {"token_ids": [5] * 500},
    "texts-for-ids": {"token_ids": ["a"]},
    "nan": {"logprobs": {"token_logprobs": [float("nan")]}},
    "list-of-logprobs": {"logprobs": [1]},
    "surrogate": {"text": "\ud800"},
    "no-text": {"text": None},
}


class StandIn:
    """What the server is, and what it has done.

    Attributes:
        failures: how the next completions after the probe fail, in this order; then they succeed.
        judge: what a chat replies to its messages.
        takes_ids, vllm, tokenizes: whether it takes token ids, has vLLM's fields and returns ids, and has `/tokenize`.
        answered: how often each prompt and seed was answered in full.
    """

    judge: Callable[[list[dict[str, str]]], str]
    # Of a chat: why its reply ends, whether it takes a schema, what it says of tokens, and whether it repeats a wrong key.
    finish_reason: Callable[[list[dict[str, str]]], str] = lambda self, messages: "stop"
    takes_schemas, says_key = True, False
    usage: dict[str, int] | None = {"prompt_tokens": 100, "completion_tokens": 10}

    def __init__(self, chat: ChatTokenizer | None, *failures: str, **settings: Any):
        self.chat, self.failures = chat, list(failures)
        self.takes_ids, self.vllm, self.tokenizes, self.bos, self.ids_in_replies = True, True, True, False, True
        self.name, self.shift, self.key, self.models, self.dead = MODEL, 0, None, [MODEL], False
        self.__dict__.update(settings)
        self.answered: Counter[tuple[str, int]] = Counter()
        self.lock, self.bodies = threading.Lock(), list[dict[str, Any]]()

    def response(self, prompt: list[int], seed: int, most: int) -> tuple[list[int], str]:
        """Tokens and why they end: those that the prompt's and the seed's digest says."""
        numbers = hashlib.sha256(f"{prompt} {seed}".encode()).digest()
        ordinary = [id for id in range(self.chat.vocab_size) if not self.chat.is_control([id])[0]]
        tokens = [ordinary[number % len(ordinary)] for number in numbers[: 2 + numbers[0] % 6]]
        ends = len(tokens) < most
        return ([*tokens, self.chat.stop_ids[0]] if ends else tokens[:most]), "stop" if ends else "length"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    about: StandIn

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.send({"data": [{"id": name} for name in self.about.models]})

    def do_POST(self) -> None:
        about = self.about
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if about.dead:
            self.close_connection = True
        elif about.key and self.headers.get("authorization") != f"Bearer {about.key}":
            sent = self.headers.get("authorization") if about.says_key else "key"
            self.send({"error": f"no such {sent}"}, 401)
        elif self.path == "/v1/chat/completions":
            self.chat(body)
        elif self.path != "/tokenize":
            self.complete(body)
        elif about.tokenizes:
            self.send({"tokens": [id + about.shift for id in about.chat.encode_text(body["prompt"]).ids]})
        else:
            self.send({"detail": "not found"}, 404)

    def complete(self, body: dict[str, Any]) -> None:
        about = self.about
        about.bodies.append(body)
        ids = body["prompt"]
        if isinstance(ids, str):
            ids = [about.chat.eos_id] * about.bos + about.chat.encode_text(ids).ids
        elif not about.takes_ids:
            self.send({"detail": "prompt must be a string."}, 400)
            return
        if "return_token_ids" in body and not about.vllm:
            self.send({"detail": "Unexpected fields"}, 422)
            return
        probe = body["max_tokens"] == 1
        with about.lock:
            failure = about.failures.pop(0) if about.failures and not probe else ""
        tokens, ended = about.response(ids, body["seed"], body["max_tokens"])
        if body.get("ignore_eos") and not about.ids_in_replies:
            ended = "length"
        choice: dict[str, Any] = {"index": 0, "text": about.chat.decode(tokens), "finish_reason": ended}
        if about.vllm and about.ids_in_replies:
            choice |= {"token_ids": tokens, "logprobs": {"token_logprobs": [-0.5] * len(tokens)}}
        reply = {"model": about.name, "choices": [choice], "usage": {"prompt_tokens": len(ids) + about.shift}}
        self.fail_or_answer(failure, reply)
        if failure in ("", "slow") and not probe:
            with about.lock:
                about.answered[str(ids), body["seed"]] += 1

    def chat(self, body: dict[str, Any]) -> None:
        about = self.about
        with about.lock:
            about.bodies.append(body)
            failure = about.failures.pop(0) if about.failures else ""
        if "response_format" in body and not about.takes_schemas:
            self.send({"error": "response_format is unknown"}, 400)
            return
        messages = body["messages"]
        message = {"role": "assistant", "content": about.judge(messages)}
        choice = {"index": 0, "message": message, "finish_reason": about.finish_reason(messages)}
        self.fail_or_answer(failure, {"model": about.name, "choices": [choice], "usage": about.usage})

    def fail_or_answer(self, failure: str, reply: dict[str, Any]) -> None:
        match failure:
            case "slow":
                time.sleep(0.3)
                self.send(reply)
            case "429":
                self.send({"error": "busy"}, 429, {"retry-after": "0"})
            case "500":
                self.send({"error": "out of memory"}, 500)
            case "cut":
                self.send(reply, cut=True)
                self.close_connection = True
            case "truncated":
                self.send(None, text=json.dumps(reply)[:-9])
            case "twice":
                self.send(reply | {"choices": reply["choices"] * 2})
            case "unfinished":
                self.send(reply | {"choices": [reply["choices"][0] | {"finish_reason": "abort"}]})
            case "filtered":
                self.send(reply | {"choices": [reply["choices"][0] | {"finish_reason": "content_filter"}]})
            case damaged if damaged in DAMAGED_REPLIES:
                self.send(reply | {"choices": [reply["choices"][0] | DAMAGED_REPLIES[damaged]]})
            case "hangs":
                time.sleep(1.5)
                self.close_connection = True
            case "other-model":
                self.send(reply | {"model": "another"})
            case "other-vocabulary":
                self.send(reply | {"usage": {"prompt_tokens": 3}})
            case "refused":
                self.send({"error": "top_k is unknown"}, 422)
            case "dies":
                self.about.dead = self.close_connection = True
            case _:
                self.send(reply)

    def send(
        self, value: Any, status: int = 200, headers: dict[str, str] | None = None, text: str = "", cut: bool = False
    ) -> None:
        content = (text or json.dumps(value)).encode()
        self.send_response(status)
        for name, header in (
            {"content-length": str(len(content)), "content-type": "application/json"} | (headers or {})
        ).items():
            self.send_header(name, header)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)


@contextmanager
def serving(about: StandIn) -> Iterator[str]:
    """The URL of the running server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"about": about}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
