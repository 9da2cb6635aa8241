"""Client programs and SDKs against a server process: the features and examples of the docs, and figures of lm-eval.

Each program runs in its own process, which records attempts to reach other hosts than loopback. The extra `clients`
installs them; a missing one skips its tests.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_box import CLIENTS as PROGRAMS
from client_box import Box, ClientError, missing_node
from server_process import Server

import nucleate as nc

sys.path.insert(0, str(PROGRAMS))
from matrix import CLIENTS, DEFAULT_URL, FLAGS, PAGE, Client

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
MODEL, KEY = "nucleate-tiny", "sk-a-key-for-the-tests"
STORY = "Tell me a story about a cat."
EXAMPLES = re.findall(r"```python\n(.*?)```", (HERE.parents[1] / "docs" / "protocols.md").read_text("utf-8"), re.DOTALL)


@pytest.fixture
def sandbox(tmp_path: Path) -> Box:
    return Box(tmp_path)


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """A server with short completions, for clients that request very many."""
    with Server("--max-model-len", "64", "--max-completion-tokens", "16") as running:
        yield running


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not installed")


def test_the_sandbox_has_no_network(tmp_path: Path) -> None:
    code = "import socket; socket.create_connection(('example.org', 80), 1)"
    with pytest.raises(AssertionError, match=r"no network here: example\.org"):
        Box(tmp_path).run("-c", code)
    with pytest.raises(AssertionError, match=r"it tried to use the network:\s+socket.getaddrinfo example\.org"):
        Box(tmp_path).run("-c", f"try: {code}\nexcept OSError: pass")


LM_EVAL = needs("lm_eval", "datasets", "aiohttp", "tenacity", "requests")


def evaluate(server: Server, sandbox: Box, options: dict[str, Any]) -> dict[str, Any]:
    """The lm-eval results of the tasks in the folder."""
    program, offline = str(PROGRAMS / "check_lm_eval.py"), {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    results = sandbox.run(program, server.url, MODEL, json.dumps(options), **offline)
    return json.loads(results.splitlines()[-1])


@LM_EVAL
@pytest.mark.parametrize(
    "options",
    [
        {"num_concurrent": 1, "batch_size": 1},
        {"num_concurrent": 1, "batch_size": 4},
        {"num_concurrent": 4, "batch_size": 2, "tokenizer_backend": "auto"},
    ],
    ids=str,
)
def test_lm_eval(server: Server, llm: nc.LLM, sandbox: Box, options: dict[str, Any]) -> None:
    results = evaluate(server, sandbox, options)
    choices = results["samples"]["nucleate_choice"]
    assert len(choices) == 5
    for sample in choices:
        for pair, ((value, greedy),) in zip(sample["arguments"], sample["responses"], strict=True):
            assert (pytest.approx(value, abs=1e-3), greedy) == score(llm, *pair)
    assert results["results"]["nucleate_choice"]["acc,none"] == 1.0
    for sample in results["samples"]["nucleate_story"]:
        prompt = plain(llm, sample["arguments"][0][0])
        assert sample["responses"] == [[llm.generate([prompt], greedy_params())[0].text]]
    for sample in results["samples"]["nucleate_rolling"]:
        value, _ = score_ids(llm, [0], plain(llm, sample["arguments"][0][0]))
        assert sample["responses"] == [[pytest.approx(value, abs=1e-3)]]


@LM_EVAL
def test_lm_eval_in_a_chat(server: Server, llm: nc.LLM, sandbox: Box) -> None:
    results = evaluate(server, sandbox, {"chat": True, "num_concurrent": 2, "eos_string": "<|end|>"})
    samples = results["samples"]["nucleate_story"]
    assert len(samples) == 5
    for sample in samples:
        (messages,), _ = sample["arguments"][0]
        assert sample["responses"] == [[llm.chat(json.loads(messages), greedy_params()).text]]


def greedy_params() -> nc.SamplingParams:
    return nc.SamplingParams(temperature=0, max_tokens=24, stop=["\n", ".", "<|endoftext|>"])


def plain(llm: nc.LLM, text: str) -> list[int]:
    return llm.tokenizer.encode(text, add_special_tokens=False)


def score(llm: nc.LLM, start: str, end: str) -> tuple[float, bool]:
    """The logprob of a continuation, and whether greedy decoding would generate it."""
    head, full_text = plain(llm, start), plain(llm, start + end)
    return score_ids(llm, full_text[: len(head)], full_text[len(head) :])


def score_ids(llm: nc.LLM, head: list[int], tail: list[int]) -> tuple[float, bool]:
    params = nc.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    results = llm.generate([[*head, *tail]], params)[0].prompt_logprobs
    assert results is not None
    steps = [step.chosen for step in results[len(head) :] if step is not None]
    return math.fsum(step.logprob for step in steps), all(step.rank == 1 for step in steps)


@needs("schemathesis")
@pytest.mark.parametrize(("mode", "status"), [("positive", "200"), ("negative", "400")])
def test_schemathesis(small: Server, sandbox: Box, mode: str, status: str) -> None:
    """Valid and invalid requests never cause a server error, and every response matches the document."""
    settings, report = str(HERE / "data" / "schemathesis.toml"), sandbox.folder / "report.json"
    tool_output = sandbox.run(
        *("-m", "schemathesis.cli", "--config-file", settings, "run", f"{small.url}/openapi.json"),
        *("--mode", mode, "--report-json-path", str(report)),
        codes=(0, 1),
        SCHEMATHESIS_HOOKS=str(HERE / "clients" / "schemathesis_hooks.py"),
    )
    results = json.loads(report.read_text())
    assert results["exit_code"] == 0, tool_output
    assert results["operations"]["tested"] == results["operations"]["total"] >= 10
    assert results["test_cases"]["generated"] > 500
    for route in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert small.metric("nucleate_http_requests_total", route=route, status=status) > 10, tool_output
    assert small.request("GET", "/health").status == 200
    assert "Traceback" not in small.log


TASK = f"nucleate_story --include_path {PROGRAMS.parent / 'data' / 'lm_eval'}"
EACH = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name.replace(" ", "_"))


@pytest.fixture(scope="module")
def scripted() -> Iterator[Server]:
    with Server(*FLAGS) as running:
        yield running


@EACH
def test_a_client_has_the_features_of_the_page(scripted: Server, tmp_path: Path, client: Client) -> None:
    if client.missing:
        pytest.skip(client.missing)
    report = client.report(scripted.url, Box(tmp_path))
    failures = {name: result for name, result in report["results"].items() if result["status"] == "failed"}
    assert not failures
    assert sum(result["status"] == "passed" for result in report["results"].values()) >= 4
    page = PAGE.read_text("utf-8")
    update = "docs/clients.md is out of date: python tests/server/clients/matrix.py"
    assert client.row(report) in page, update
    assert client.section(report) in page, update


@EACH
def test_the_example_of_a_client_runs(server: Server, tmp_path: Path, client: Client) -> None:
    if client.missing:
        pytest.skip(client.missing)
    code = (PROGRAMS / "snippets" / client.snippet).read_text("utf-8").replace(DEFAULT_URL, server.url)
    if client.snippet.endswith(".mjs"):
        command, folder = ("node", "--input-type=module", "--eval", code), PROGRAMS / "js"
    elif client.snippet.endswith(".sh"):
        command, folder = ("sh", "-c", code.replace("lambada_openai", TASK)), PROGRAMS.parent / "data" / "lm_eval"
    else:
        command, folder = (sys.executable, "-c", code), tmp_path
    variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_DATASETS_OFFLINE": "1"}
    assert len(Box(tmp_path).run_program(*command, cwd=folder, **variables)) > 8


def test_without_the_script_no_call_is_made_by_choice(server: Server, tmp_path: Path) -> None:
    """The checks can fail: the bundled model tells a story."""
    client = CLIENTS[0]
    if client.missing:
        pytest.skip(client.missing)
    results = client.report(server.url, Box(tmp_path))["results"]
    failed = {name for name, result in results.items() if result["status"] == "failed"}
    assert failed == {"auto", "parallel", "streamed call", "loop", "reasoning", "responses"}


def test_the_sandbox_of_node_has_no_network(tmp_path: Path) -> None:
    if reason := missing_node():
        pytest.skip(reason)
    code = "await fetch('http://example.org').catch(() => {})"
    with pytest.raises(ClientError, match=r"it tried to use the network:\s+connect example\.org"):
        Box(tmp_path).run_program("node", "--input-type=module", "--eval", code)


def test_no_address_of_a_registry_is_in_the_lock_file() -> None:
    assert '"resolved"' not in (PROGRAMS / "js" / "package-lock.json").read_text("utf-8")


@pytest.fixture(scope="module")
def reasoning() -> Iterator[Server]:
    with Server("--reasoning-parser", "qwen3") as running:
        yield running


def test_reasoning_in_the_responses_api(reasoning: Server) -> None:
    openai = pytest.importorskip("openai")
    given = {
        "model": MODEL,
        "input": [{"role": "user", "content": STORY}, {"role": "assistant", "content": "<think>"}],
        "max_output_tokens": 16,
        "extra_body": {"continue_final_message": True, "max_reasoning_tokens": 4, "ignore_eos": True, "seed": 3},
    }
    with openai.OpenAI(base_url=f"{reasoning.url}/v1", api_key=KEY, max_retries=0) as client:
        whole = client.responses.create(**given)
        assert [item.type for item in whole.output] == ["reasoning", "message"]
        assert whole.usage.output_tokens_details.reasoning_tokens >= 4
        found = [*client.responses.create(**given, stream=True)]
        text = "".join(event.delta for event in found if event.type == "response.reasoning_text.delta")
        assert text == whole.output[0].content[0].text
        again = [*given["input"][:1], *(item.to_dict() for item in whole.output), given["input"][0]]
        assert client.responses.create(model=MODEL, input=again, max_output_tokens=4).output


def test_thinking_in_the_messages_api(reasoning: Server) -> None:
    anthropic = pytest.importorskip("anthropic")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    tool = {"name": "f", "description": "d", "input_schema": {**schema, "additionalProperties": False}}
    given = {
        "model": MODEL,
        "messages": [{"role": "user", "content": STORY}, {"role": "assistant", "content": "<think>"}],
        "thinking": {"type": "enabled", "budget_tokens": 4},
        "tools": [tool],
        "tool_choice": {"type": "tool", "name": "f"},
        "max_tokens": 200,
        "extra_body": {"seed": 3},
    }
    with anthropic.Anthropic(base_url=reasoning.url, api_key=KEY, max_retries=0) as client:
        whole = client.messages.create(**given)
        assert [block.type for block in whole.content] == ["thinking", "tool_use"]
        with client.messages.stream(**given) as stream:
            thinking = "".join(event.thinking for event in stream if event.type == "thinking")
        assert thinking == whole.content[0].thinking
        result = {"type": "tool_result", "tool_use_id": whole.content[1].id, "content": "ok"}
        turns = [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        messages = [given["messages"][0], *turns]
        assert client.messages.create(model=MODEL, messages=messages, tools=[tool], max_tokens=4).content


def test_thinking_in_ollamas_api(reasoning: Server) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=reasoning.url, timeout=60.0)
    turns = [{"role": "user", "content": STORY}, {"role": "assistant", "content": "<think>"}]
    given = {"think": True, "options": {"max_reasoning_tokens": 4, "num_predict": 16, "seed": 3, "ignore_eos": True}}
    whole = client.chat(MODEL, turns, **given).message
    assert whole.thinking
    parts = [*client.chat(MODEL, turns, stream=True, **given)]
    assert "".join(part.message.thinking or "" for part in parts) == whole.thinking
    assert "".join(part.message.content for part in parts) == whole.content


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.split()[1])
def test_the_examples_of_the_docs_run(server: Server, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(code.split()[1])
    names: dict[str, Any] = {}
    exec(compile(code.replace(DEFAULT_URL, server.url), "<example>", "exec"), names)
    names["client"].close()
    assert len(capsys.readouterr().out) > 20
