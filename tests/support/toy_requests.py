"""Models without weights and random requests for the engine's tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np
from toy_models import CellToy, PagedToy, SavingToy, Toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.generation.loop import generate
from nucleate.models.runner import SequentialRunner
from nucleate.outputs import CompletionChunk, EngineOutput
from nucleate.structured_output import GrammarCompiler
from nucleate.tokenization.tokenizer import Tokenizer

SIZE = 4096
TABLE = np.random.default_rng(0).normal(0, 3, (97, SIZE)).astype(np.float32)
TABLE[:, 0] += 6.0  # EOS, so that outputs end


def rule(seen: tuple[int, ...]) -> np.ndarray:
    """Logits that depend on every token and on their order."""
    return TABLE[hash(seen) % len(TABLE)]


def toy(context_length: int = 256, of: Callable[[tuple[int, ...]], np.ndarray] = rule) -> Toy:
    return Toy(of, SIZE, context_length)


def runner(kind: str, model: Toy, blocks: int = 64, block_size: int = 4) -> PagedToy | SequentialRunner | CellToy:
    if kind == "contexts":
        return SequentialRunner(model, blocks, block_size)
    if kind == "states":
        return SavingToy(model, blocks, block_size)
    if "cells" in kind:
        return CellToy(model, blocks, block_size, whole=kind == "whole cells")
    return PagedToy(model, blocks, block_size, asynchronous=kind == "asynchronous")


KINDS = ("paged", "asynchronous", "contexts", "states")
CELLS = ("cells", "whole cells")
"""The same behind the runner of GGUF models."""


def random_request(rng: random.Random, longest: int = 40) -> Request:
    """A request with random parameters."""
    prompt = [rng.randrange(1, 40) for _ in range(rng.randint(1, longest))]
    if rng.random() < 0.5:
        prompt = [*range(1, rng.randint(2, 30)), *prompt]
    values = {
        "temperature": rng.choice([0.0, 0.7, 1.3]),
        "top_k": rng.choice([0, 1, 20]),
        "top_p": rng.choice([1.0, 0.8]),
        "repetition_penalty": rng.choice([1.0, 1.2]),
        "typical_p": rng.choice([1.0, 1.0, 0.7]),
        "max_tokens": rng.randint(1, 24),
        "min_tokens": rng.choice([0, 0, 1]),
        "stop": rng.choice([(), ("a",), ("th", "e ")]),
        "stop_regex": rng.choice([(), (), ("[0-9]+x",)]),
        "logprobs": rng.choice([None, None, 0, 2]),
        "prompt_logprobs": rng.choice([None, None, None, 1]),
        "seed": rng.randrange(2**64),
        "n": rng.choice([1, 1, 1, 2, 5]),
        "ignore_eos": rng.random() < 0.2,
    }
    return Request(prompt, nc.SamplingParams(**values), priority=rng.choice([0, 0, 0, 1, -1]))


def drive(engine: Engine, requests: Iterable[Request], most: int = 20_000) -> list[list[EngineOutput]]:
    """Submit requests together and run the engine. Returns the events of each request."""
    ids = [engine.add(request) for request in requests]
    events: dict[str, list[EngineOutput]] = {number: [] for number in ids}
    for _ in range(most):
        if not len(engine):
            return [events[number] for number in ids]
        for event in engine.step():
            events[event.request_id].append(event)
    raise AssertionError(f"not done after {most} steps: {engine.stats}")


def run_tokens(engine: Engine, requests: Iterable[Request]) -> list[list[int]]:
    """The tokens of the first output of each request."""
    return [tokens_of(events) for events in drive(engine, requests)]


def check_prefix_to_the_token(llm: nc.LLM) -> None:
    """Prompts take from the prefix cache what they have in common, to the token, and the outputs stay the same."""
    engine = llm.new_engine(max_num_seqs=4)
    size, params = engine.runner.block_size, nc.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    story = llm.encode("Once upon a time there was a little girl named Lily. She had a dog. " * 8)[: 2 * size + 7]
    [answer] = run_tokens(engine, [Request(story, params)])
    cases = [
        (story, len(story) - 1),
        ([*story[:-3], 400, 401, 402], len(story) - 3),
        ([*story[: size + 1], *[403] * size], size + 1),
        ([*story, *answer, 17, 18], len(story) + len(answer) - 1),  # the answer's last token was not computed
        (story[:2], 1),
        ([404, *story], 0),
    ]
    plain = llm.new_engine(enable_prefix_caching=False)
    for at_once in (1, len(cases)):
        for start in range(0, len(cases), at_once):
            some = [Request(ids, params) for ids, _ in cases[start : start + at_once]]
            found = drive(engine, some)
            assert [tokens_of(events) for events in found] == run_tokens(plain, some)
            for events, (_, cached) in zip(found, cases[start : start + at_once], strict=True):
                found_cached = events[-1].usage.cached_tokens
                assert found_cached >= cached if at_once > 1 else found_cached == cached


def reference_chunks(
    model: Toy,
    tokenizer: Tokenizer,
    request: Request,
    grammars: GrammarCompiler | None = None,
    companion_model: Toy | None = None,
) -> list[list[CompletionChunk]]:
    """The chunks of each output of a request, from the reference loop."""
    ids, params = request.prompt_ids, request.params
    return [
        list(generate(model, tokenizer, ids, params, index, grammars, companion_model)) for index in range(params.n)
    ]


def chunks_by_index(events: list[EngineOutput], count: int) -> list[list[CompletionChunk]]:
    return [[event.chunk for event in events if event.chunk.index == index] for index in range(count)]


def tokens_of(events: list[EngineOutput], index: int = 0) -> list[int]:
    """The tokens of an output."""
    return [token for event in events if event.chunk.index == index for token in event.chunk.token_ids]


def is_empty(engine: Engine) -> bool:
    """Whether an engine has no requests, blocks or sampler rows left."""
    stats = engine.stats
    left = (
        len(engine),
        stats.num_running_seqs,
        stats.num_waiting_seqs,
        stats.num_used_kv_blocks,
        len(engine._sampler),
    )
    return left == (0,) * 5 and not engine._token_sampler._pending and not getattr(engine.runner, "_open", None)
