"""The cost of structured output: grammar masks relative to the forward pass and the step, compilation, masked sampling.

1. The embedded model generates with a constant number of sequences: unconstrained, with a grammar, with masks computed
   after the forward pass instead of during it, and with forced tokens sampled like others. The variants alternate.
2. Masks alone, for its vocabulary of 4096 tokens and for one of 128256 (``made_vocabulary``), along texts that the
   embedded model has generated with the same grammars.
3. Compilation of the fifty schemas of the tests, for both vocabularies.
4. Sampling 32 rows of 128256 logits, with and without masks.

    python benchmarks/structured.py [--json FILE] [--seconds 0.7] [--repeat 5]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from made_vocabulary import vocabulary
from sampler import machine, versions

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from grammar_examples import SCHEMAS, array, closed, integer, text

import nucleate as nc
from nucleate.cli.bench import CHAINS, logits, medians
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.sampling.sampler import Sampler
from nucleate.structured_output import CompiledGrammar, GrammarCompiler, Guide, StructuredOutputs
from nucleate.tokenization.tokenizer import Tokenizer

ROWS = (1, 8, 32)
LARGE = 128_256
TARGET = 0.10
"""Target: share of masks in the time of a step, for 32 sequences of the embedded model."""
SAMPLED: Mapping[str, Any] = dict(temperature=0.8, top_k=40, top_p=0.9)
UNUSED = 1
"""A special token that no grammar here allows. Banning it only disables jump-forward tokens."""

_RECORD = closed(
    ("tags", "born"),
    name=text(20),
    kind={"enum": ["person", "animal", "thing"]},
    age=integer(0, 120),
    tags=array(text(10), 0, 3),
    born={"type": "string", "format": "date"},
)
_MANY = {f"field_{i}": integer(0, 9) for i in range(30)}
GRAMMARS: dict[str, StructuredOutputs] = {
    "easy: numbers": StructuredOutputs(json_schema=array(integer(0, 999), 40, 40)),
    "typical: records": StructuredOutputs(json_schema=array(_RECORD, 3, 3)),
    "hard: patterns, 30 optional fields": StructuredOutputs(
        json_schema=closed(
            tuple(_MANY),
            story=text(200, pattern="^(?:[A-Z][a-z]{1,9}(?: [a-z]{1,9}){3,8}[.!?] ?){2,9}$"),
            mail=text(40, format="email"),
            **_MANY,
        )
    ),
    "any text of 5 to 400 characters": StructuredOutputs(regex="(?s).{5,400}"),
}


class GenerationLoad:
    """The embedded model with a constant number of running sequences, and their total cost."""

    def __init__(self, llm: nc.LLM, rows: int, params: nc.SamplingParams, *, overlap: bool = True) -> None:
        prompt = llm.encode("Once upon a time")
        self._engine: Engine = llm.new_engine(max_num_seqs=rows)
        if not overlap:
            self._engine._grammars.prefetch = lambda _: None  # type: ignore[method-assign]  # noqa: SLF001
        self._rows = rows
        self._requests = itertools.cycle(
            [self._engine.prepare(Request(prompt, params.replace(seed=i))) for i in range(97)]
        )
        self._append_seconds, sampler = 0.0, self._engine._token_sampler  # noqa: SLF001
        sampler._append_constrained = self._timed(sampler._append_constrained)  # type: ignore[method-assign]  # noqa: SLF001
        self.sums = dict.fromkeys(
            ("seconds", "forward", "sampler", "masks", "appending tokens", "tokens", "jump forward", "steps"), 0.0
        )
        self.run(0.0, steps=20)
        self.sums = dict.fromkeys(self.sums, 0.0)

    def _timed(self, function: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any) -> None:
            start = perf_counter()
            function(*arguments)
            self._append_seconds += perf_counter() - start

        return timed

    def run(self, seconds: float, steps: int = 0) -> None:
        """Run for some seconds, and a minimum number of steps."""
        engine, before, append_seconds = self._engine, self._engine.stats, self._append_seconds
        start = perf_counter()
        while perf_counter() - start < seconds or engine.num_steps - before.num_steps < steps:
            while len(engine) < self._rows:
                engine.add(next(self._requests))
            engine.step()
        took, after = perf_counter() - start, engine.stats
        forced = after.jump_forward_tokens - before.jump_forward_tokens
        found = (
            *(took, after.forward_seconds - before.forward_seconds, after.sampling_seconds - before.sampling_seconds),
            *(after.grammar_mask_seconds - before.grammar_mask_seconds, self._append_seconds - append_seconds),
            *(after.sampled_tokens - before.sampled_tokens + forced, forced, after.num_steps - before.num_steps),
        )
        for name, more in zip(self.sums, found, strict=True):
            self.sums[name] += more

    @property
    def result(self) -> dict[str, float]:
        sums = self.sums
        shares = {
            f"share of {name}": sums[name] / sums["seconds"]
            for name in ("forward", "sampler", "masks", "appending tokens")
        }
        return {
            "tokens per second": sums["tokens"] / sums["seconds"],
            "share of jump-forward tokens": sums["jump forward"] / sums["tokens"],
            "step in microseconds": sums["seconds"] / sums["steps"] * 1e6,
            "masks of a step in microseconds": sums["masks"] / sums["steps"] * 1e6,
            **shares,
        }


def generation(llm: nc.LLM, seconds: float, repeat: int) -> list[dict[str, Any]]:
    """Part 1: generation."""
    found = []
    for (name, grammar), rows in itertools.product(GRAMMARS.items(), ROWS):
        params = nc.SamplingParams(**SAMPLED, structured_outputs=grammar)
        length = statistics.mean(len(one.outputs[0].token_ids) for one in generate(llm, grammar, 32))
        contenders = {
            "unconstrained": GenerationLoad(
                llm, rows, nc.SamplingParams(**SAMPLED, ignore_eos=True, max_tokens=round(length))
            ),
            "grammar": GenerationLoad(llm, rows, params),
            "grammar, masks after the forward pass": GenerationLoad(llm, rows, params, overlap=False),
            "grammar, no jump-forward": GenerationLoad(llm, rows, params.replace(suppress_token_ids=[UNUSED])),
        }
        for _ in range(repeat):
            for contender in contenders.values():
                contender.run(seconds)
        result = {contender: one.result for contender, one in contenders.items()}
        print(f"{name:36}{rows:>3} rows: {_line(result)}", flush=True)
        found.append({"what": name, "rows": rows, "tokens per output": length, **result})
    return found


def _line(result: Mapping[str, Mapping[str, float]]) -> str:
    own, after = result["grammar"], result["grammar, masks after the forward pass"]
    shares = ", ".join(
        f"{part} {own[f'share of {part}']:.1%}" for part in ("forward", "sampler", "masks", "appending tokens")
    )
    speed = own["tokens per second"]
    ratios = ", ".join(
        f"{speed / result[other]['tokens per second']:.2f} x {other}" for other in result if other != "grammar"
    )
    forced = f"{own['share of jump-forward tokens']:.0%} jump-forward"
    return f"{shares} (after the forward pass {after['share of masks']:.1%}); {speed:.0f} tokens/s, {ratios}; {forced}"


def generate(llm: nc.LLM, grammar: StructuredOutputs, count: int) -> list[nc.Completion]:
    """Texts that the embedded model generates with a grammar."""
    params = [
        nc.SamplingParams(**SAMPLED, structured_outputs=grammar, seed=seed, max_tokens=700) for seed in range(count)
    ]
    return llm.generate(["Once upon a time"] * count, params)


def tokenize_with(grammar: CompiledGrammar, tokens_of: Mapping[bytes, int], text: bytes) -> list[int]:
    """A text in the longest tokens that its grammar allows."""
    matcher, mask_W, tokens, index = grammar.matcher(), np.empty(grammar.num_words, np.int32), [], 0
    while index < len(text) and not matcher.terminated:
        matcher.fill_bitmask(mask_W)
        for end in range(min(len(text), index + 64), index, -1):
            token = tokens_of.get(text[index:end], -1)
            if token >= 0 and mask_W[token // 32] >> (token % 32) & 1:
                break
        else:
            break  # the end of a truncated text
        matcher.accept_token(token)
        tokens.append(token)
        index = end
    return tokens


class GuideWalk:
    """Guides of one grammar that advance through texts, at different positions."""

    def __init__(self, grammar: CompiledGrammar, walks: Sequence[Sequence[int]]) -> None:
        self._grammar, self._walks = grammar, walks
        self._next = 0
        self.guide, self._tokens = self._begun()
        for _ in range(len(self._walks[0]) // 2):
            self.push()

    def _begun(self) -> tuple[Guide, Iterator[int]]:
        self._next += 1
        return Guide(self._grammar), iter(self._walks[self._next % len(self._walks)])

    def push(self) -> None:
        token = next(self._tokens, None)
        while token is None:
            self.guide, self._tokens = self._begun()
            token = next(self._tokens, None)
        if self.guide.accept_token(token):
            self.guide, self._tokens = self._begun()


def mask_times(
    name: str, grammars: GrammarCompiler, walks: Mapping[str, list[list[int]]], steps: int
) -> list[dict[str, Any]]:
    """Part 2, for one vocabulary: masks."""
    found = []
    for (grammar, structured_outputs), rows in itertools.product(GRAMMARS.items(), ROWS):
        compiled = grammars.compile(structured_outputs)
        own = walks[grammar]
        walking = [GuideWalk(compiled, own[row % len(own) :] + own[: row % len(own)]) for row in range(rows)]
        masks_RW = np.empty((rows, grammars.num_words), np.int32)
        times: dict[str, list[float]] = {"fill": [], "push": [], "jump forward": []}
        for _ in range(steps):
            clock = [perf_counter()]
            grammars.fill_all([each.guide.matcher for each in walking], masks_RW)
            clock.append(perf_counter())
            for each in walking:
                each.push()
            clock.append(perf_counter())
            for each in walking:
                each.guide.jump_forward_tokens()
            clock.append(perf_counter())
            for (_, durations), (begin, end) in zip(times.items(), itertools.pairwise(clock), strict=True):
                durations.append((end - begin) * 1e6)
        result = {
            what: {"median": statistics.median(durations), "mean": statistics.mean(durations), "max": max(durations)}
            for what, durations in times.items()
        }
        result["fill"]["p99"] = sorted(times["fill"])[int(0.99 * len(times["fill"]))]
        each = {what: f"{numbers['median']:.0f}" for what, numbers in result.items()}
        print(
            f"{name:>9} {grammar:36}{rows:>3} rows: us of a step, median: {each}, fill p99 {result['fill']['p99']:.0f}",
            flush=True,
        )
        found.append({"vocabulary": name, "grammar": grammar, "rows": rows, "microseconds of a step": result})
    return found


def compile_times(tokenizer: Tokenizer, size: int, repeat: int) -> dict[str, float]:
    """Part 3, for one vocabulary: compilation, in milliseconds."""
    start = perf_counter()
    grammars = GrammarCompiler(tokenizer, size, cache_bytes=0)
    once = perf_counter() - start
    grammars.compile(StructuredOutputs(json_object=True))
    times: dict[str, list[float]] = {name: [] for name in SCHEMAS}
    for _ in range(repeat):
        for name, schema in SCHEMAS.items():
            structured_outputs = StructuredOutputs(json_schema=schema)
            start = perf_counter()
            grammars.compile(structured_outputs)
            times[name].append((perf_counter() - start) * 1e3)
    each = {name: statistics.median(durations) for name, durations in times.items()}
    slowest = max(each, key=lambda name: each[name])
    middle, most = statistics.median(each.values()), each[slowest]
    print(f"compiling for {size} tokens: p50 {middle:.2f} ms, max {most:.1f} ms ({slowest}); once: {once:.2f} s")
    return {"p50": middle, "max": most, "once": once * 1e3}


def sampling_times(masks: Mapping[str, Any], rows: int, seconds: float) -> list[dict[str, Any]]:
    """Part 4: sampling with masks."""
    x_RV = logits("peaked", rows, LARGE)
    found = []
    for chain in ("greedy", "T .8, top_k 40, min_p .05, top_p .95", "T .7, top_p .9"):
        calls = {}
        for name, mask in {"no mask": None, **masks}.items():
            sampler = Sampler(LARGE)
            for row in range(rows):
                sampler.add(nc.SamplingParams(seed=row, **CHAINS[chain]))
            calls[name] = lambda sampler=sampler, mask=mask: sampler(x_RV, mask=mask)
        times = medians(calls, seconds)
        print(
            f"{rows} x {LARGE}, {chain:38}" + "".join(f"  {name}: {took:.0f} us" for name, took in times.items()),
            flush=True,
        )
        found.append({"chain": chain, "microseconds": times})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=0.7, help="duration of a turn [default 0.7]")
    parser.add_argument("--repeat", type=int, default=5, help="number of turns [default 5]")
    parser.add_argument("--vocabulary", type=Path, metavar="FILE", help="cache file of the large vocabulary")
    options = parser.parse_args()
    llm, start = nc.LLM(), perf_counter()
    results: dict[str, Any] = {"machine": machine(), "versions": versions()}
    results["generation"] = generation(llm, options.seconds, options.repeat)
    full = [case for case in results["generation"] if case["rows"] == max(ROWS)]
    for kind in ("grammar", "grammar, masks after the forward pass"):
        worst = max(case[kind]["share of masks"] for case in full)
        print(f"{kind}: masks take at most {worst:.1%} of a step at {max(ROWS)} rows; the target is {TARGET:.0%}")
    texts = {name: [one.text.encode() for one in generate(llm, grammar, 8)] for name, grammar in GRAMMARS.items()}
    vocabularies = {
        "embedded": (llm.tokenizer, llm.model.vocab_size),
        "made": (vocabulary(LARGE, options.vocabulary), LARGE),
    }
    results["filling"], results["compiling, ms"], masks = [], {}, {}
    for name, (tokenizer, size) in vocabularies.items():
        results["compiling, ms"][name] = compile_times(tokenizer, size, 3)
        grammars = GrammarCompiler(tokenizer, size)
        pieces = tokenizer.pieces
        tokens_of = {pieces.as_bytes(token): token for token in pieces.table if token not in tokenizer.special_ids}
        walks = {
            grammar: [tokenize_with(grammars.compile(one), tokens_of, text) for text in texts[grammar]]
            for grammar, one in GRAMMARS.items()
        }
        results["filling"] += mask_times(name, grammars, walks, 400)
        masks = first_masks(grammars, 32)
    results["applying"] = sampling_times(masks, 32, 5 * options.seconds)
    print(f"{perf_counter() - start:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def first_masks(grammars: GrammarCompiler, rows: int) -> dict[str, Any]:
    """Masks that allow few and many tokens."""
    grammars_by_name = {
        "few tokens": StructuredOutputs(regex="[0-9]{9}"),
        "most tokens": StructuredOutputs(regex="(?s).{9,999}"),
    }
    masks = {"all tokens": np.full((rows, grammars.num_words), -1, np.int32)}
    for name, grammar in grammars_by_name.items():
        mask_W = Guide(grammars.compile(grammar)).mask()
        masks[f"{name} ({int(np.bitwise_count(mask_W.view(np.uint32)).sum())})"] = np.repeat(mask_W, rows, axis=0)
    return masks


if __name__ == "__main__":
    main()
