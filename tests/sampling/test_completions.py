"""Servers with the completions interface: each response is asked for until it is there, and once; nothing that arrived is lost;
another model or vocabulary is refused."""

import time

import numpy as np
import pytest
from pydantic import ValidationError

from snaketune.config.generation import Decoding, Server
from snaketune.errors import SnaketuneError
from snaketune.sampling.completions import Completions
from snaketune.sampling.responses import Request, ResponseCache, batches
from snaketune.servers import client as server_client
from snaketune.servers.client import ServerClient, connection
from snaketune.servers.usage import Usage
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.tokenization.chat import ChatTokenizer
from tests.tokenization.small_tokenizers import TEXTS, train_in

from .stand_in import DAMAGED_REPLIES, MODEL, StandIn, serving


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """Waits of hundredths of a second between attempts."""
    wait = server_client._wait
    monkeypatch.setattr(server_client, "_wait", lambda state: wait(state) / 20)


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> ChatTokenizer:
    return ChatTokenizer.load(train_in(tmp_path_factory.mktemp("tokenizer"), "bpe")[0].payload)


@pytest.fixture(scope="module")
def prompts(chat) -> list[np.ndarray]:
    return [chat.encode_prompt([{"role": "user", "content": text}]) for text in TEXTS[:12]]


def engine_of(
    url: str,
    chat: ChatTokenizer,
    patience: float = 20.0,
    key: str | None = None,
    server: dict | None = None,
    **decoding,
) -> Completions:
    server = Server(url=url, model=MODEL, key_variable=key, **(server or {}))
    connect = connection(server)

    def impatient():
        client = connect()
        client.timeout = 1.0
        return client

    decoding = Decoding(**({"max_new_tokens": 6, "temperature": 1.0} | decoding))
    client = ServerClient(connect=impatient, usage=Usage(server=server), concurrent=4, patience=patience)
    return Completions(client=client, url=server.url, model_name=MODEL, chat=chat, decoding=decoding)


def sampled(engine: Completions, prompts: list[np.ndarray], responses: int = 2) -> dict:
    found = {}
    for arrived in engine.generate(batches(prompts, responses, 8)):
        assert not found.keys() & arrived.keys()
        found |= arrived
    return found


@pytest.fixture(scope="module")
def expected(chat, prompts) -> dict:
    with serving(StandIn(chat)) as url:
        return sampled(engine_of(url, chat), prompts)


def test_responses_are_kept_by_the_name_of_the_model_alone(chat):
    """Neither another address nor an edit of this package generates again what was paid for."""
    assert engine_of("http://localhost:1", chat).identity() == {"name": "server", "model": MODEL}


def test_responses_are_those_of_the_server(chat, prompts, expected):
    about = StandIn(chat)
    assert len(expected) == 24
    for prompt in prompts:
        for index in range(2):
            request = Request(prompt, index)
            seed = int.from_bytes(request.seed(0)[:4], "little") >> 1
            tokens, ended = about.response(prompt.tolist(), seed, 6)
            response = expected[request.digest]
            assert (response.tokens, response.ended) == (tokens, ended)
            assert response.text == chat.decode(tokens) and response.logp == pytest.approx(-0.5 * len(tokens))
    assert {response.ended for response in expected.values()} == {"stop", "length"}


@pytest.mark.parametrize("failure", ["slow", "429", "500", "cut", "truncated", "twice", "unfinished", "hangs"])
def test_a_failure_that_passes_loses_nothing_and_samples_nothing_twice(chat, prompts, expected, failure):
    # A damaged answer is asked for again twice.
    about = StandIn(chat, *[failure] * (2 if failure in ("truncated", "twice", "unfinished") else 6))
    with serving(about) as url:
        assert sampled(engine_of(url, chat), prompts) == expected
    assert not about.failures
    assert len(about.answered) == 24 and set(about.answered.values()) == {1}


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ("other-model", "answered as another, not as tuned"),
        ("other-vocabulary", "has another vocabulary"),
        ("refused", "status 422: .*top_k is unknown"),
        ("dies", r"failed for 1.5 s, last with \w+Error.*finished responses are kept"),
        ("filtered", r"damaged an answer 3 times, last: .*content_filter"),
        *((name, r"damaged an answer 3 times") for name in DAMAGED_REPLIES),
    ],
)
def test_after_a_failure_that_does_not_pass_only_the_rest_is_sampled(tmp_path, chat, prompts, expected, failure, said):
    wanted, parts = batches(prompts, 2, 8), {"weights": ["a"]}

    def complete(url: str) -> tuple[int, ResponseCache]:
        # The port is another one at each start.
        cache = ResponseCache(WorkFolder(tmp_path / "generate/f"), engine_of(url, chat, patience=1.5), parts)
        return cache.complete(wanted)[0], cache

    times = 9 if failure in DAMAGED_REPLIES or failure == "filtered" else 1
    first, again = StandIn(chat, *[""] * 9, *[failure] * times), StandIn(chat)
    with serving(first) as url, pytest.raises(SnaketuneError, match=said):
        complete(url)
    with serving(again) as url:
        generated, cache = complete(url)
    assert cache.known == expected and 0 < generated < 24
    # What was on its way when the server died is asked again.
    lost = 4 if failure == "dies" else 0
    assert 24 <= (first.answered + again.answered).total() <= 24 + lost
    assert max((first.answered + again.answered).values()) == 1 or failure == "dies"
    # After it, no other request is tried again for long.
    assert len(first.bodies) < 40


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "another", "models": ["another"]}, "serves another, and not 'tuned'"),
        ({"models": ["base", "other"]}, "serves base, other, and not 'tuned'"),
        ({"shift": 1}, "has another vocabulary"),
        ({"shift": 7, "tokenizes": False}, r"has another vocabulary .* tokens, not \d+"),
        ({"key": "right"}, "refuses the key: .*under key_variable of this server"),
    ],
)
def test_another_model_or_vocabulary_is_refused_before_anything_is_sampled(chat, prompts, settings, said):
    about = StandIn(chat, **settings)
    with serving(about) as url, pytest.raises(SnaketuneError, match=said):
        sampled(engine_of(url, chat), prompts)
    assert all(body["max_tokens"] == 1 for body in about.bodies)


def test_a_server_without_the_fields_of_vllm_gets_those_of_openai(chat, prompts, expected):
    about = StandIn(chat, vllm=False)
    with serving(about) as url:
        found = sampled(engine_of(url, chat, stop=["zzz"], top_p=0.9), prompts)
    body = about.bodies[-1]
    assert body.keys() <= {"model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop"}
    assert body["stop"][0] == "zzz" and chat.text([chat.stop_ids[0]]) in body["stop"]
    assert {digest: response.text for digest, response in found.items()} == {
        digest: response.text for digest, response in expected.items()
    }
    assert all(response.logp is None for response in found.values())


def test_a_server_that_ignores_the_fields_of_vllm_is_not_asked_to_ignore_the_end(chat, prompts, expected):
    """llama.cpp takes all fields, and obeys `ignore_eos`, but returns no ids."""
    about = StandIn(chat, ids_in_replies=False)
    with serving(about) as url:
        found = sampled(engine_of(url, chat), prompts)
    assert all("ignore_eos" not in body for body in about.bodies if body["max_tokens"] > 1)
    assert {digest: response.text for digest, response in found.items()} == {
        digest: response.text for digest, response in expected.items()
    }
    about = StandIn(chat, ids_in_replies=False)
    with serving(about) as url, pytest.raises(SnaketuneError, match=r"no field .* for generation.repetition_penalty"):
        sampled(engine_of(url, chat, repetition_penalty=1.3), prompts)


def test_a_stop_text_that_a_server_keeps_is_cut_off(chat, prompts, expected):
    stop = next(response.text[2:4] for response in expected.values() if len(response.text) > 5)
    with serving(StandIn(chat, vllm=False)) as url:
        found = sampled(engine_of(url, chat, stop=[stop]), prompts)
    assert any(stop in response.text for response in expected.values())
    assert not any(stop in response.text for response in found.values())


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_the_address_may_end_with_the_path_of_the_interface(chat, prompts, expected, path):
    with serving(StandIn(chat)) as url:
        assert sampled(engine_of(f"{url}{path}", chat), prompts) == expected


def test_a_server_that_is_not_there_is_waited_for_a_minute_at_most(chat, prompts, monkeypatch):
    monkeypatch.setattr(server_client, "FIRST_PATIENCE", 0.5)
    with pytest.raises(SnaketuneError, match=r"failed for 0.5 s, .*ConnectError"):
        sampled(engine_of("http://127.0.0.1:9", chat, patience=600), prompts)


@pytest.mark.parametrize(
    "url", ["http://localhost:99999", "http://a b", "ftp://host", "http://me:word@host", "http://host:80a"]
)
def test_an_address_that_is_none_is_refused_in_the_config(url):
    with pytest.raises(ValidationError):
        Server(url=url, model="m")


def test_an_address_that_no_host_can_have_is_refused(chat):
    with pytest.raises(SnaketuneError, match=r"operation.engine.url: 'http://xn--a' is no address"):
        connection(Server(url="http://xn--a", model="m"))


def test_a_server_may_call_a_model_otherwise_than_the_list(chat, prompts, expected):
    about = StandIn(chat, name="upstream/name")
    with serving(about) as url:
        assert sampled(engine_of(url, chat), prompts) == expected


def test_proxies_are_not_asked_for_servers_of_this_machine(chat, prompts, expected, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with serving(StandIn(chat)) as url:
        assert sampled(engine_of(url, chat), prompts) == expected


@pytest.mark.parametrize("bos", [False, True])
def test_a_server_that_takes_texts_gets_the_text_of_the_same_tokens(chat, prompts, expected, bos):
    about = StandIn(chat, vllm=False, takes_ids=False, tokenizes=False, bos=bos)
    with serving(about) as url:
        if bos:
            # The template begins with another token.
            with pytest.raises(SnaketuneError, match="puts a token before each text"):
                sampled(engine_of(url, chat), prompts)
            return
        found = sampled(engine_of(url, chat), prompts)
    assert {digest: response.text for digest, response in found.items()} == {
        digest: response.text for digest, response in expected.items()
    }


def test_the_key_comes_from_the_environment_and_is_sent_to_the_server_alone(chat, prompts, monkeypatch, capsys):
    monkeypatch.setenv("SERVER_KEY", "word-of-a-server")
    about = StandIn(chat, key="word-of-a-server")
    with serving(about) as url:
        engine = engine_of(url, chat, key="SERVER_KEY")
        assert len(sampled(engine, prompts)) == 24
    assert "word-of-a-server" not in f"{engine.identity()} {engine.about()}" + "".join(capsys.readouterr())
    monkeypatch.delenv("SERVER_KEY")
    with pytest.raises(SnaketuneError, match="the environment has no SERVER_KEY"):
        engine_of("http://localhost:1", chat, key="SERVER_KEY")
    for odd in ("two words", "kéy", "a\nb"):
        monkeypatch.setenv("SERVER_KEY", odd)
        with pytest.raises(SnaketuneError, match="holds is no key") as refused:
            engine_of("http://localhost:1", chat, key="SERVER_KEY")
        assert odd not in str(refused.value)


def test_interrupted_generation_ends_at_once(chat, prompts):
    """Requests on their way aren't waited for."""
    about, started = StandIn(chat, *[""] * 4, *["hangs"] * 20), time.monotonic()
    with serving(about) as url:
        arriving = engine_of(url, chat).generate(batches(prompts, 2, 8))
        assert next(arriving)
        arriving.close()
        assert time.monotonic() - started < 3
