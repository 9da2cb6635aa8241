"""Structured output over the application: with and without streaming, with other fields, and errors."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from grammar_examples import RECORD, validated
from served_apps import (
    SIZE,
    ask,
    begin,
    check_error,
    ids_of,
    longest_hold,
    rule,
    serve_toy,
    streamed,
    text_of,
    toy_app,
    until,
)
from toy_models import PagedToy, Toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.parameters.parameter import ParameterError
from nucleate.server import service as service_module
from nucleate.server.limits import ServerLimits
from nucleate.server.service import Service
from nucleate.structured_output import GrammarCompiler

PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
SUBJECT: dict[str, dict[str, Any]] = {
    PATH: {"prompt": [7, 8, 9], "max_tokens": 150, "seed": 3},
    CHAT_PATH: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 150, "seed": 3},
}
PATHS = pytest.mark.parametrize("path", SUBJECT)
NAMED = {"name": "x", "schema": validated(4), "strict": False}
LENIENT = {"response_format": {"type": "json_schema", "json_schema": NAMED}}


def is_record(text: str) -> bool:
    return [*json.loads(text)] == ["name", "kind", "sizes"]


CONSTRAINTS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": RECORD}}}, is_record),
    ({"structured_outputs": {"json": json.dumps(RECORD), "disable_any_whitespace": True}}, is_record),
    ({"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}}, re.compile("[0-9]{3}-[0-9]{4}").fullmatch),
    ({"structured_outputs": {"choice": ["yes", "no", "perhaps not today"]}}, ["yes", "no", "perhaps not today"].count),
    ({"structured_outputs": {"grammar": 'root ::= "(" root ")" | "x"'}}, re.compile(r"\(*x\)*").fullmatch),
    ({"structured_outputs": {"grammar": 'start: "(" start ")" | "x"'}}, re.compile(r"\(*x\)*").fullmatch),
    ({"structured_outputs": {"regex": "a very long text that leaves no choice at all"}}, lambda text: len(text) == 45),
]
EACH = pytest.mark.parametrize(("fields", "right"), CONSTRAINTS, ids=[str(fields)[:60] for fields, _ in CONSTRAINTS])


def parts_of(call: Any, index: int = 0) -> list[Any]:
    """The choices of a stream with one output that ended normally."""
    assert call.status == 200
    assert call.frames[-1] == "[DONE]"
    found = [choice for frame in call.frames[:-1] for choice in frame["choices"] if choice["index"] == index]
    assert [part["finish_reason"] is None for part in found] == [True] * (len(found) - 1) + [False]
    return found


@PATHS
@EACH
@pytest.mark.fast_cases(3)
@toy_app()
async def test_structured_output_with_and_without_streaming(
    app: Any, path: str, fields: dict[str, Any], right: Any
) -> None:
    body = {**SUBJECT[path], **fields, "n": 3}
    response = await ask(app, path, body)
    stream = await ask(app, path, {**body, "stream": True})
    assert response.status == 200, response.data
    for choice in response.json["choices"]:
        assert right(text_of(choice)), choice
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert "validation" not in choice
        parts = parts_of(stream, choice["index"])
        assert streamed(parts) == text_of(choice)
        assert ids_of(parts) == choice["token_ids"]
        assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == ("stop", None)
        assert not any("validation" in part for part in parts)
    made = sum(len(choice["token_ids"]) for choice in response.json["choices"])
    assert response.json["usage"]["completion_tokens"] == made


@toy_app()
async def test_forced_tokens_are_generated_at_once(app: Any, service: Service) -> None:
    before = service.engine.stats
    call = await ask(
        app, PATH, {**SUBJECT[PATH], "structured_outputs": {"regex": "a very long text " * 3}, "stream": True}
    )
    parts, after = parts_of(call), service.engine.stats
    assert streamed(parts) == "a very long text " * 3
    assert after.num_steps - before.num_steps == 1
    assert after.jump_forward_tokens - before.jump_forward_tokens == len(ids_of(parts)) - 1
    assert len(parts) <= 2
    text = (await ask(app, "/metrics")).data.decode()
    assert f'nucleate_jump_forward_tokens_total{{model_name="toy"}} {float(after.jump_forward_tokens)}' in text
    assert 'nucleate_structured_output_requests_total{kind="regex",model_name="toy"} 1.0' in text
    [seconds] = re.findall(r"^nucleate_grammar_mask_seconds_total\S+ (\S+)$", text, re.MULTILINE)
    assert float(seconds) == after.grammar_mask_seconds > 0


@toy_app()
async def test_best_of_and_echo_with_structured_output(app: Any) -> None:
    constraint = {"structured_outputs": {"regex": "[0-9]{4}"}}
    body = {**SUBJECT[PATH], **constraint, "prompt": ["The fox", "A cat"], "best_of": 5, "n": 2, "echo": True}
    choices = (await ask(app, PATH, body)).json["choices"]
    assert [bool(re.fullmatch("(The fox|A cat)[0-9]{4}", choice["text"])) for choice in choices] == [True] * 4
    every = (await ask(app, PATH, {**body, "best_of": 5, "n": 5})).json["choices"]
    assert {choice["seed"] for choice in choices[:2]} <= {choice["seed"] for choice in every[:5]}
    silent = await ask(app, PATH, {**SUBJECT[PATH], **LENIENT, "prompt": "The fox", "echo": True, "max_tokens": 0})
    [choice] = silent.json["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("The fox", [], "length")
    assert "validation" not in choice


@pytest.mark.slow
@PATHS
@toy_app()
async def test_validation_results_of_a_schema_with_ignored_keywords(app: Any, path: str) -> None:
    body = {**SUBJECT[path], **LENIENT, "n": 2}
    response = await ask(app, path, body)
    stream = await ask(app, path, {**body, "stream": True})
    for choice in response.json["choices"]:
        assert len(json.loads(text_of(choice))) == 4
        assert choice["validation"]["ignored"] == ["uniqueItems"]
        [error] = choice["validation"]["errors"]
        assert "non-unique" in error
        *others, last = parts_of(stream, choice["index"])
        assert last["validation"] == choice["validation"]
        assert not any("validation" in part for part in others)
    cut = (await ask(app, path, {**body, "max_tokens": 2})).json["choices"][0]
    assert cut["finish_reason"] == "length"
    assert cut["validation"]["errors"][0].startswith("not JSON")


def _dead_end(llm: nc.LLM) -> dict[str, Any]:
    """Parameters with which an output reaches nine letters but cannot end."""
    seven = [token for token in range(SIZE) if "7" in llm.tokenizer.decode([token])]
    return {"structured_outputs": {"regex": "a{9}7"}, "suppress_token_ids": seven}


@PATHS
@toy_app()
async def test_text_before_a_failure_is_sent_to_a_slow_client_too(
    app: Any, service: Service, llm: nc.LLM, path: str
) -> None:
    stream = begin(app, path, {**SUBJECT[path], **_dead_end(llm), "stream": True})
    stream.reads.clear()
    stats = service.engine.stats
    while not stats.sampled_tokens or stats.num_running_seqs or stats.num_waiting_seqs:
        await asyncio.sleep(0.001)
        stats = service.engine.stats
    await asyncio.sleep(0.02)  # the chunks are buffered all at once
    stream.reads.set()
    await asyncio.wait_for(stream.task, 30)
    *chunks, error, done = stream.frames
    assert streamed([chunk["choices"][0] for chunk in chunks]) == "a" * 9
    assert error["error"]["param"] == "structured_outputs"
    assert done == "[DONE]"


@pytest.mark.slow
@PATHS
@toy_app()
async def test_a_ban_of_all_allowed_tokens_is_a_client_error(app: Any, llm: nc.LLM, path: str) -> None:
    body = {**SUBJECT[path], **_dead_end(llm)}
    other = begin(app, PATH, {**SUBJECT[PATH], "prompt": [1]})
    response = await ask(app, path, body)
    check_error(response, 400, param="structured_outputs", type="invalid_request_error", code=None)
    assert "no token satisfies the structured-output constraint" in response.json["error"]["message"]
    stream = await ask(app, path, {**body, "stream": True})
    *chunks, error, done = stream.frames
    assert streamed([chunk["choices"][0] for chunk in chunks]) == "a" * 9
    assert (error, done) == (response.json, "[DONE]")
    await other.task
    assert other.status == 200
    text = (await ask(app, "/metrics")).data.decode()
    assert 'nucleate_request_errors_total{kind="model",model_name="toy"} 0.0' in text


@PATHS
@toy_app()
async def test_compilation_failures_are_rejected_and_counted(app: Any, path: str, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "nucleate.server")
    secret = {"type": "object", "properties": {"very private": {"uniqueItems": True}}}
    for field, constraint, words in (
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": secret}}, ".schema: can"),
        ("structured_outputs", {"regex": "very private("}, ".regex: "),
        ("structured_outputs", {"grammar": "start: very_private"}, ".grammar: at "),
        ("structured_outputs", {"regex": ""}, ".regex must be"),
        ("response_format", {"type": "very private"}, ".type must be one of"),
    ):
        for stream in (False, True):
            call = await ask(app, path, {**SUBJECT[path], field: constraint, "stream": stream})
            check_error(call, 400, param=field, type="invalid_request_error", code=None)
            assert call.json["error"]["message"].startswith(field)
            assert words in call.json["error"]["message"]
    good = await ask(app, path, {**SUBJECT[path], "structured_outputs": {"choice": ["very private"]}})
    assert good.status == 200
    text = (await ask(app, "/metrics")).data.decode()
    assert 'nucleate_structured_output_errors_total{model_name="toy"} 10.0' in text
    assert 'nucleate_structured_output_requests_total{kind="choice",model_name="toy"} 1.0' in text
    lines = [record.fields for record in caplog.records if record.getMessage() == "request"]
    assert [line.get("structured_outputs") for line in lines[:11]] == [None] * 10 + ["choice"]
    assert "private" not in json.dumps(lines)


# ---- timing


COSTLY: list[tuple[Callable[[int], Any], int]] = [
    (
        lambda seed: {"patternProperties": {f"^k{seed}{i:03}": {} for i in range(150)}, "additionalProperties": False},
        200,
    ),
    (lambda seed: {"type": "object", "properties": {f"p{seed}{i}": {} for i in range(1000)}}, 200),
    (lambda seed: {"title": f"{seed}", "anyOf": [{}] * 20_000}, 400),
]


@pytest.mark.parametrize(("schema", "status"), COSTLY, ids=["patterns", "properties", "too many"])
@pytest.mark.fast_cases(0)
@toy_app()
async def test_the_event_loop_is_not_blocked_by_a_grammar_compilation(
    app: Any, schema: Callable[[int], Any], status: int
) -> None:
    shares = []
    for seed in range(4):  # one is enough: the machine may run other programs
        constraint = {"json_schema": schema(seed)}
        call = begin(app, PATH, {**SUBJECT[PATH], "max_tokens": 1, "structured_outputs": constraint})
        shares.append(await longest_hold(call.task))
        assert call.status == status
    assert min(shares) < 0.4, shares


@pytest.mark.slow
def test_a_compilation_survives_a_cancelled_caller(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    started, gate = threading.Event(), threading.Event()
    compile_ = GrammarCompiler.compile

    def blocked_compile(self: GrammarCompiler, structured_outputs: Any) -> Any:
        compiled.append(structured_outputs.regex)
        if structured_outputs.regex == "slow":
            started.set()
            gate.wait(60)
        return compile_(self, structured_outputs)

    async def use(app: Any, service: Service) -> None:
        def asking(regex: str) -> Any:
            return begin(app, PATH, {**SUBJECT[PATH], "structured_outputs": {"regex": regex}})

        await asking("a").task
        monkeypatch.setattr(GrammarCompiler, "compile", blocked_compile)
        waiting = [asking("slow")]
        await asyncio.to_thread(started.wait, 60)
        leaver = asking("slow 2")
        waiting += [asking("quick") for _ in range(9)]  # more than there are threads
        await asyncio.sleep(0.05)
        leaver.leave()
        assert (await ask(app, PATH, {**SUBJECT[PATH], "max_tokens": 1})).status == 200  # without a constraint
        await asyncio.gather(leaver.task, *(call.task for call in waiting))
        for call in waiting:
            check_error(call, 504, code="timeout", type="server_error")
        assert not leaver.status
        assert service.num_requests == 0
        gate.set()
        last = asking("again")
        await last.task
        assert last.json["choices"][0]["text"] == "again"
        assert compiled == ["slow", "again"]  # the other callers had been cancelled before their turn

    try:
        monkeypatch.setattr(service_module, "PREPARE_TIMEOUT_SECONDS", 1.5)
        serve_toy(llm, use)
    finally:
        gate.set()


# ---- startup


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that make a compiler."""
    names: list[str] = []
    begin_ = GrammarCompiler.__init__

    def started(self: GrammarCompiler, *arguments: Any, **options: Any) -> None:
        names.append(threading.current_thread().name)
        begin_(self, *arguments, **options)

    monkeypatch.setattr(GrammarCompiler, "__init__", started)
    return names


GRAMMARS = ["nucleate-grammars_0"]


@pytest.fixture
def idle_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "IDLE_SECONDS", 0.01)


@toy_app()
async def test_the_grammar_vocabulary_is_prepared_in_an_idle_moment(
    idle_at_once: None, app: Any, made: list[str]
) -> None:
    await until(lambda: made)
    assert (await ask(app, PATH, {**SUBJECT[PATH], "structured_outputs": {"regex": "a"}})).status == 200
    assert made == GRAMMARS


@pytest.mark.slow
@toy_app()
async def test_a_first_constraint_does_not_wait_for_an_idle_moment(app: Any, made: list[str]) -> None:
    assert (await ask(app, PATH, SUBJECT[PATH])).status == 200
    assert made == []
    assert (await ask(app, PATH, {**SUBJECT[PATH], "structured_outputs": {"regex": "a"}})).status == 200
    assert made == GRAMMARS


@pytest.fixture
def without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("structured output needs the package llguidance")

    monkeypatch.setattr(GrammarCompiler, "__init__", missing)


@toy_app()
async def test_a_server_without_llguidance_serves_other_requests(app: Any, without_llguidance: None) -> None:
    assert (await ask(app, PATH, SUBJECT[PATH])).status == 200
    for field, constraint in (("response_format", {"type": "json_object"}), ("structured_outputs", {"regex": "a"})):
        call = await ask(app, PATH, {**SUBJECT[PATH], field: constraint})
        check_error(call, 400, param=field)
        assert call.json["error"]["message"].startswith(f"{field}: structured output needs the package llguidance")


def test_a_default_constraint_applies_unless_the_request_sets_one(llm: nc.LLM) -> None:
    def made(structured_outputs: Any) -> Service:
        engine = Engine(PagedToy(Toy(rule, SIZE, 256), 400, 4), llm.tokenizer, backend="reference")
        return Service(
            llm, engine, "toy", nc.SamplingParams(structured_outputs=structured_outputs, seed=1), ServerLimits()
        )

    service = made({"regex": "[0-9]{3}"})
    read = service.prepare(service.parse(PATH, b'{"prompt": [1]}'))
    assert (read.constraint, read.prepared[0].grammar is None) == (("regex", "structured_outputs"), False)
    free = service.parse(PATH, b'{"prompt": [1], "response_format": {"type": "text"}}')
    assert (free.constraint, free.prepared[0].grammar) == (None, None)
    with pytest.raises(ParameterError, match="never closed"):
        made({"regex": "("})
    assert np.isfinite(rule((1,))).all()


DIGITS = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 4, "maxItems": 4}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "d", "schema": DIGITS}}}
TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
    "type": "object", "properties": {"d": DIGITS}, "required": ["d"], "additionalProperties": False}}}  # fmt: skip


async def compact_json(app: Any) -> list[bool]:
    """Whether the answers to some requests for JSON have no white space."""
    found = [
        text_of((await ask(app, PATH, {**SUBJECT[PATH], **fields})).json["choices"][0])
        for fields in (
            FORMAT,
            {"structured_outputs": {"json": DIGITS}},
            {"structured_outputs": {"json": DIGITS, "whitespace": "flexible"}},
            {"structured_outputs": {"json": DIGITS, "whitespace": "none"}},
        )
    ]
    body = {**SUBJECT[CHAT_PATH], "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    answer = await ask(app, CHAT_PATH, {**body, "max_tokens": 69})
    assert answer.status == 200, answer.json
    found.append(answer.json["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
    return [not any(map(str.isspace, text)) for text in found]


@toy_app(engine={"json_whitespace": "none"})
async def test_the_server_may_select_compact_json(app: Any) -> None:
    assert await compact_json(app) == [True, True, False, True, True]


@toy_app()
async def test_json_may_have_white_space_by_default(app: Any) -> None:
    assert await compact_json(app) == [False, False, False, True, False]
