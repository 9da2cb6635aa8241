"""Conformance runs: every fault is found by the name of its check, and a right service or sampler has no difference."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import tiers
from faulty_service import FAULTS, FaultyService

import nucleate as nc
from nucleate.comparison.exact_tests import Findings, NotTested
from nucleate.comparison.sampler_checks import check_sampler, load_sampler
from nucleate.comparison.service_checks import check_service
from nucleate.comparison.service_client import Client, RequestError, Service, ServiceError

RELATED = {"distribution", "order", "penalties", "errors"}
"""Groups in which one fault may show itself in several checks."""


def named(found: Findings, outcome: str) -> dict[str, str]:
    return {one.name: one.found for one in found.findings if one.outcome == outcome}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_name(fault: str) -> None:
    found = check_service(Service(FaultyService(fault)), 600)
    different = named(found, "differs")
    assert FAULTS[fault] <= different.keys()
    others = [one for one in found.findings if one.outcome == "differs" and one.name not in FAULTS[fault]]
    groups = {one.group for one in found.findings if one.name in FAULTS[fault]}
    assert {one.group for one in others} <= RELATED & (groups | ({"order", "penalties"} if "draws" in fault else set()))


@pytest.mark.slow
def test_the_order_that_is_used_instead_is_named() -> None:
    different = named(check_service(Service(FaultyService("top_p first")), 1280), "differs")
    assert different["temperature, then top_p"].endswith("top_p, then temperature")
    assert different["min_p, then top_p"].endswith("top_p, then min_p")
    different = named(check_service(Service(FaultyService("top_k keeps one more")), 1280), "differs")
    assert different["top_k keeps"].endswith("It fits k + 1 tokens")


@pytest.mark.slow
def test_the_right_service_has_no_difference_with_any_seed() -> None:
    for seed in range(tiers.count(3, 60)):
        found = check_service(Service(FaultyService(), seed=seed), 1000)
        assert named(found, "differs") == {}, seed
        assert named(found, "not tested") == {}
        assert "one of 10,000 runs" in found.about["power"]


@pytest.mark.slow
def test_a_service_with_chats_only() -> None:
    found = check_service(Service(FaultyService(chat=True)), 400)
    assert found.about["endpoint"] == "/v1/chat/completions"
    assert named(found, "differs") == named(found, "not tested") == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "skipped"),
    [
        ("logprobs", {"logprobs", "temperature 1", "top_k keeps", "order", "number of logprobs"}),
        ("n", {"n", "choices differ", "usage of n", "n 0"}),
        ("min_p", {"min_p", "min_p 1 is greedy", "min_p keeps", "temperature, then min_p", "min_p 1.5"}),
        ("seed", {"seed", "seeds differ", "seed among others"}),
    ],
)
def test_a_field_that_is_refused_is_not_tested(field: str, skipped: set[str]) -> None:
    found = check_service(Service(FaultyService(without=(field,))), 200)
    assert named(found, "differs") == {}
    untested = named(found, "not tested")
    groups = {one.group for one in found.findings if one.outcome == "not tested"}
    assert skipped <= untested.keys() | groups
    assert untested[field].startswith("not supported: refused with status 400")
    assert len(untested) < (22 if field == "logprobs" else 8)


@pytest.mark.slow
def test_a_spent_budget_ends_the_requests() -> None:
    class Few(FaultyService):
        def send(self, path: str, body: Any = None) -> str:
            if self.requests >= 60:
                raise NotTested("the budget of 60 requests is spent")
            return super().send(path, body)

    found = check_service(Service(Few()), 600)
    assert found.about["requests"] == 60
    assert "the budget of 60 requests is spent" in named(found, "not tested").values()
    assert named(found, "differs") == {}


def test_a_service_that_dies_is_no_crash() -> None:
    class Dying(FaultyService):
        def send(self, path: str, body: Any = None) -> str:
            if self.requests >= 30:
                raise ServiceError("http://service.test cannot be reached: Connection refused")
            return super().send(path, body)

    found = check_service(Service(Dying()), 200)
    assert named(found, "differs") == {}
    assert "cannot be reached" in named(found, "not tested")["usage"]


@pytest.mark.parametrize(
    "answer", [{"choices": []}, {"choices": [None]}, {"choices": [{"logprobs": {"content": [1]}}]}]
)
def test_answers_of_another_shape(answer: Any) -> None:
    class Odd(FaultyService):
        def send(self, path: str, body: Any = None) -> str:
            return json.dumps(answer)

    with pytest.raises(ServiceError, match="choices"):
        Service(Odd(), "model")


# the client


@contextmanager
def served(respond: Any) -> Iterator[str]:
    """The URL of a server that answers with (status, body) of a function of (path, headers, body)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"] or 0))
            status, body = respond(self.path, self.headers, data)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_the_client_sends_its_key_and_counts() -> None:
    seen = []

    def respond(path: str, headers: Any, data: bytes) -> tuple[int, bytes]:
        seen.append((path, headers["authorization"], data))
        return 200, b'{"a": 1}'

    with served(respond) as url:
        for base in (url, f"{url}/", f"{url}/v1", f"{url}/v1/"):
            client = Client(base, "secret", budget=2)
            assert client.json("/v1/x", {"b": 2}) == {"a": 1}
        assert {*seen} == {("/v1/x", "Bearer secret", b'{"b": 2}')}
        client.json("/v1/y")
        assert client.requests == 2
        with pytest.raises(NotTested, match="the budget of 2 requests is spent"):
            client.json("/v1/y")


def test_errors_of_the_client() -> None:
    release = threading.Event()

    def respond(path: str, headers: Any, data: bytes) -> tuple[int, bytes]:
        if path.endswith("slow"):
            release.wait(60)
        if path.endswith("500"):
            return 500, b"Internal Server Error"
        if path.endswith("422"):
            return 422, b'{"detail": [{"loc": ["body", "top_k"], "msg": "too low"}]}'
        return 200, b"<html>no JSON</html>"

    with served(respond) as url:
        client = Client(url, timeout=0.2)
        with pytest.raises(RequestError, match="status 500: Internal Server Error"):
            client.json("/v1/500", {})
        with pytest.raises(RequestError, match=r"status 422: .*top_k"):
            client.json("/v1/422", {})
        with pytest.raises(ServiceError, match=r"the response of /v1/x is not a JSON object: '<html>no"):
            client.json("/v1/x", {})
        with pytest.raises(ServiceError, match=r"did not answer within 0.2 s"):
            client.json("/v1/slow", {})
        with pytest.raises(ServiceError, match="not a JSON object"):
            Service(client)
        release.set()
    with pytest.raises(ServiceError, match=r"127.0.0.1:\d+ cannot be reached: .*refused"):
        Service(client)
    for bad in ("127.0.0.1:80", "ftp://x", "http://", "http://x?y=1"):
        with pytest.raises(nc.ParameterError, match="url must be http://HOST:PORT"):
            Client(bad)


# samplers


def nucleate_sampler(logits: np.ndarray, parameters: dict[str, Any], seeds: list[int]) -> Any:
    history = [parameters.pop(name, []) for name in ("prompt_token_ids", "output_token_ids")]
    params = [nc.SamplingParams(**parameters, seed=seed) for seed in seeds]
    prompt, output = ([each] * len(logits) for each in history)
    return nc.sample(logits, params, prompt_ids=prompt, output_ids=output)


ALLOWED = {
    "temperature": (0, 1e9),
    "top_k": (-1, 2**31),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (1e-9, 1e9),
}


def plain_sampler(logits: np.ndarray, parameters: dict[str, Any], seeds: list[int], first: str = "temperature") -> Any:
    """The documented meaning in a few lines of NumPy. first: a stage that runs before all others."""
    for name in parameters.keys() - {"logit_bias", "prompt_token_ids", "output_token_ids"}:
        low, high = ALLOWED[name]
        if not low <= parameters[name] <= high:
            raise ValueError(name)
    if np.isnan(logits).any() or not np.isfinite(logits).any(-1).all():
        raise ValueError("a row is invalid")
    made: dict[bytes, np.ndarray] = {}
    tokens = []
    for row, seed in zip(logits, seeds, strict=True):
        if row.tobytes() not in made:
            made[row.tobytes()] = np.cumsum(plain_distribution(row.astype(np.float64), parameters, first))
        cumulative = made[row.tobytes()]
        u = np.random.default_rng(seed).random() * cumulative[-1]
        tokens.append(int(np.searchsorted(cumulative, u, side="right")))
    return tokens


def plain_distribution(x: np.ndarray, parameters: dict[str, Any], first: str) -> np.ndarray:
    for token, amount in parameters.get("logit_bias", {}).items():
        x[token] += amount
    output = parameters.get("output_token_ids", [])
    seen = [*{*parameters.get("prompt_token_ids", []), *output}]
    r = parameters.get("repetition_penalty", 1.0)
    x[seen] = np.where(x[seen] > 0, x[seen] / r, x[seen] * r)
    for token in {*output}:
        x[token] -= parameters.get("frequency_penalty", 0.0) * output.count(token) + parameters.get(
            "presence_penalty", 0
        )
    t, k = parameters.get("temperature", 1.0), parameters.get("top_k", 0)
    order = np.argsort(-x, kind="stable")
    if t == 0:
        return np.eye(len(x))[order[0]]
    rank = np.argsort(order)
    p = np.exp(x - x.max())
    for name in (first, *(each for each in ("temperature", "top_k", "min_p", "top_p") if each != first)):
        if name == "temperature":
            p = p ** (1 / t)
        elif name == "top_k" and k > 0:
            p = np.where(rank < k, p, 0.0)
        elif name == "min_p":
            p = np.where(p >= parameters.get("min_p", 0.0) * p.max(), p, 0.0)
        elif name == "top_p":
            before = (np.cumsum(p[order]) - p[order])[rank]
            p = np.where((before < parameters.get("top_p", 1.0) * p.sum()) | (rank == 0), p, 0.0)
    return p


def changed(first: str = "temperature", **change: Any) -> Any:
    """The plain sampler with other parameters or seeds: functions of the given ones; None removes a parameter."""

    def sample(logits: np.ndarray, parameters: dict[str, Any], seeds: list[int]) -> Any:
        for name, new in change.items():
            if name == "seeds":
                seeds = new(seeds)
            elif name in parameters:
                parameters[name] = new(parameters[name])
        given = {name: value for name, value in parameters.items() if value is not None}
        return plain_sampler(logits, given, seeds, first)

    return sample


@pytest.mark.slow
def test_right_samplers_have_no_difference() -> None:
    for sample, seeds in ((nucleate_sampler, 1), (plain_sampler, tiers.count(2, 40))):
        for seed in range(seeds):
            found = check_sampler(sample, draws=1280 if sample is plain_sampler else 400, seed=seed)
            assert named(found, "differs") == named(found, "not tested") == {}, seed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sample", "names"),
    [
        (changed(top_k=lambda k: k + 1), {"top_k 1 is greedy", "top_k keeps"}),
        (changed(top_k=lambda _: None), {"top_k"}),
        (changed("top_p"), {"temperature, then top_p", "top_k, then top_p", "min_p, then top_p"}),
        (changed("min_p"), {"temperature, then min_p"}),
        (changed(seeds=lambda seeds: [7] * len(seeds)), {"seed"}),
        (changed(seeds=lambda seeds: [s + len(seeds) for s in seeds]), {"seed among others"}),
        (changed(temperature=lambda t: t * t), {"temperature 0.6", "temperature 1.6"}),
        (changed(min_p=lambda m: m / 2), {"min_p keeps"}),
        (changed(top_p=lambda p: p * 0.7), {"top_p keeps"}),
        (changed(frequency_penalty=lambda f: f * 2), {"amounts"}),
        (changed(repetition_penalty=lambda r: r * 1.3), {"repetition"}),
        (changed(logit_bias=lambda bias: {k: v * 2 for k, v in bias.items()}), {"amount of logit_bias"}),
        (lambda logits, p, seeds: [0.5] * len(logits), {"temperature", "seed", "temperature 1"}),
        (lambda logits, p, seeds: np.zeros((len(logits), 1), int), {"temperature 1"}),
        (lambda logits, p, seeds: np.full(len(logits), 10**6), {"temperature 1"}),
    ],
)
def test_a_fault_of_a_sampler_is_found_by_name(sample: Any, names: set[str]) -> None:
    assert names <= named(check_sampler(sample), "differs").keys()


@pytest.mark.slow
def test_a_sampler_in_float16_that_hides_errors() -> None:
    def sample(logits: np.ndarray, parameters: dict[str, Any], seeds: list[int]) -> Any:
        if set(parameters) - {"temperature"}:
            raise NotImplementedError("only temperature")
        logits[...] = np.nan_to_num(logits.astype(np.float16).astype(np.float32), neginf=-1e4)
        return plain_sampler(logits, {"temperature": max(parameters.get("temperature", 1.0), 0.01)}, seeds)

    found = check_sampler(sample, draws=400)
    different, untested = named(found, "differs"), named(found, "not tested")
    assert untested["top_k keeps"] == "not supported: only temperature"
    assert "changes the logits that it is given" in different["seed"]


def test_loading_a_sampler(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_sampler_module.py").write_text("def sample(*_): return 1\nclass A:\n    b = 5\n", "utf-8")
    assert load_sampler("own_sampler_module:sample")(None, {}, []) == 1  # type: ignore[arg-type]
    for name, message in (
        ("own_sampler_module", "URL or MODULE:FUNCTION"),
        ("own_sampler_module:other", "cannot load own_sampler_module:other"),
        ("no_such_module_here:x", "No module named"),
        ("own_sampler_module:A.b", "must be a function, got int"),
        ("a b:c", "URL or MODULE:FUNCTION"),
    ):
        with pytest.raises(nc.ParameterError, match=message):
            load_sampler(name)
