"""Client programs of OpenAI's API against a server process, without a network.

Each runs in its own process, which records attempts to reach other hosts than loopback. Its output must be what the
library returns. The extra `clients` installs them. test_client_matrix.py checks the features of more clients.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_box import Box
from server_process import Server

import nucleate as nc

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
MODEL = "nucleate-tiny"
PROMPT = "Once upon a time"
HELLO = [{"role": "user", "content": "Tell me a story about a cat."}]
SAMPLED = {"temperature": 0.9, "seed": 7, "max_tokens": 16}
OWN = {"min_p": 0.02, "dry_multiplier": 0.8}


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


def of_chat(llm: nc.LLM, messages: list[dict[str, str]] = HELLO, **fields: Any) -> nc.Completion:
    return llm.chat(messages, llm.default_params.replace(**{**SAMPLED, **fields}))


def of_prompt(llm: nc.LLM, prompt: str = PROMPT, **fields: Any) -> str:
    return llm.generate(prompt, llm.default_params.replace(**{**SAMPLED, **fields}))[0].text


def test_the_sandbox_has_no_network(tmp_path: Path) -> None:
    code = "import socket; socket.create_connection(('example.org', 80), 1)"
    with pytest.raises(AssertionError, match=r"no network here: example\.org"):
        Box(tmp_path).run("-c", code)
    with pytest.raises(AssertionError, match=r"it tried to use the network:\s+socket.getaddrinfo example\.org"):
        Box(tmp_path).run("-c", f"try: {code}\nexcept OSError: pass")


@needs("litellm")
def test_litellm(server: Server, llm: nc.LLM, sandbox: Box) -> None:
    script = str(HERE / "clients" / "with_litellm.py")
    results = json.loads(sandbox.run(script, server.url, MODEL, LITELLM_LOCAL_MODEL_COST_MAP="True").splitlines()[-1])
    chat = of_chat(llm)
    usage = [chat.usage.prompt_tokens, 16]
    assert results == {
        "chat": chat.text,
        "finish_reason": "length",
        "usage": usage,
        "logprobs": [2] * 16,
        "streamed": chat.text,
        "built": [chat.text, *usage],
        "async": chat.text,
        "several": [of_chat(llm, seed=seed).text for seed in range(8)],
        "text": of_prompt(llm),
        "text streamed": of_prompt(llm),
        "own": of_chat(llm, **OWN).text,
        "top_k": of_chat(llm, top_k=1).text,
        "n": [output.text for output in of_chat(llm, n=2).outputs],
        "unknown field": "BadRequestError",
        "too long": "ContextWindowExceededError",
        "unknown model": "NotFoundError",
    }


@needs("langchain_openai")
def test_langchain(server: Server, llm: nc.LLM, sandbox: Box) -> None:
    results = json.loads(sandbox.run(str(HERE / "clients" / "with_langchain.py"), server.url, MODEL).splitlines()[-1])
    chat, question = of_chat(llm), HELLO[0]["content"]
    usage = [chat.usage.prompt_tokens, 16]
    others = [[{"role": "user", "content": f"Tell me of a {thing}."}] for thing in ("dog", "hat", "boat")]
    with_system_prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    assert results == {
        "chat": chat.text,
        "finish_reason": "length",
        "usage": usage,
        "streamed": chat.text,
        "streamed usage": usage,
        "streamed finish_reason": "length",
        "async": chat.text,
        "batch": [chat.text] * 4,
        "several": [of_chat(llm, messages).text for messages in others],
        "logprobs": [2] * 16,
        "streamed logprobs": 16,
        "conversation": of_chat(llm, with_system_prompt).text,
        "own": of_chat(llm, **OWN).text,
        "stop": of_chat(llm, stop=" ").text,
        "text": of_prompt(llm, top_p=1.0),  # the client sends its own default
        "text streamed": of_prompt(llm, top_p=1.0),
        "text batch": [of_prompt(llm, top_p=1.0)] * 2,
        "unknown field": ["OpenAIInvalidRequestError", "temprature"],
        "too long": ["OpenAIContextOverflowError", "messages"],
        "unknown model": ["OpenAIModelNotFoundError", "model"],
    }


@needs("llm")
def test_llm(server: Server, llm: nc.LLM, sandbox: Box) -> None:
    models = sandbox.folder / "extra-openai-models.yaml"
    kinds = {"tiny": "", "tiny-text": "  completion: true\n"}
    models.write_text(
        "".join(
            f"- model_id: {name}\n  model_name: {MODEL}\n  api_base: {server.url}/v1\n{more}"
            for name, more in kinds.items()
        )
    )
    options = ["-o", "temperature", "0.9", "-o", "seed", "7", "-o", "max_tokens", "16"]

    def run_llm(name: str, prompt: str, *more: str) -> str:
        return sandbox.run(
            "-m", "llm", "prompt", "-m", name, prompt, *options, *more, LLM_USER_PATH=str(sandbox.folder)
        )

    chat, question = of_chat(llm).text, HELLO[0]["content"]
    assert run_llm("tiny", question) == run_llm("tiny", question, "--no-stream") == chat + "\n"
    assert run_llm("tiny-text", PROMPT) == run_llm("tiny-text", PROMPT, "--no-stream") == of_prompt(llm) + "\n"
    messages = [*HELLO, {"role": "assistant", "content": chat}, {"role": "user", "content": "And then?"}]
    run_llm("tiny", question)
    assert run_llm("tiny", "And then?", "--continue") == of_chat(llm, messages).text + "\n"
    with_system_prompt = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert run_llm("tiny", question, "--system", "Be brief.") == of_chat(llm, with_system_prompt).text + "\n"
    logged = json.loads(sandbox.run("-m", "llm", "logs", "--json", "-n", "1", LLM_USER_PATH=str(sandbox.folder)))
    assert logged[0]["output_tokens"] == 16


LM_EVAL = needs("lm_eval", "datasets", "aiohttp", "tenacity", "requests")


def evaluate(server: Server, sandbox: Box, options: dict[str, Any]) -> dict[str, Any]:
    """The lm-eval results of the tasks in the folder."""
    folder = HERE / "data" / "lm_eval"
    script, offline = str(HERE / "clients" / "with_lm_eval.py"), {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    results = sandbox.run(script, server.url, MODEL, str(folder), json.dumps(options), cwd=folder, **offline)
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
