"""Masks, single and batched, against reference implementations; copies, the end of the text, and errors."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import regex
import tokenizers
from bundled_grammars import TOKENIZER, allowed, bundled_compiler, grammar_of, mask_of, tokens_of
from tag_twin import compiler_of
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from nucleate import structured_output
from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarMatcher,
    MatcherError,
    StructuredOutputs,
    llguidance_library,
)
from nucleate.structured_output.grammar_matcher import InitialMatcher, TimeBudget
from nucleate.tokenization.tokenizer import Tokenizer

OBJECT = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name"]}
CONSTRAINTS = [
    StructuredOutputs(json_schema=OBJECT),
    StructuredOutputs(json_schema=OBJECT, whitespace="none"),
    StructuredOutputs(json_object=True),
    StructuredOutputs(regex="[a-c]{2,9}(x|yz)?"),
    StructuredOutputs(choice=("yes", "no", "nothing at all")),
    StructuredOutputs(grammar='start: "(" start ")" | /[0-9]+/'),
    StructuredOutputs(regex="(.|\n)*"),
]


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, 4096, threads=2)


def walk(matcher: GrammarMatcher, steps: int, rng: random.Random, ends: frozenset[int] = frozenset()) -> list[int]:
    """Accept random allowed tokens; return them."""
    pushed = []
    for _ in range(steps):
        tokens = [token for token in allowed(matcher) if token not in ends]
        if not tokens:
            break
        pushed.append(rng.choice(tokens))
        matcher.accept_token(pushed[-1])
    return pushed


def accepts(matcher: GrammarMatcher, token: int) -> bool:
    try:
        matcher.copy().accept_token(token)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda constraint: constraint.to_json()[:40])
@pytest.mark.fast_cases(0)
def test_a_mask_equals_trying_every_token(constraint: StructuredOutputs) -> None:
    """Where only one text can follow, the engine forces the first token of its usual tokenization instead."""
    matcher = bundled_compiler().compile(constraint).matcher()
    rng = random.Random(1)
    for _ in range(5):
        tried = [token for token in range(4096) if accepts(matcher, token)]
        forced = matcher.jump_forward_tokens()
        assert allowed(matcher) == (list(forced[:1]) or tried)
        assert set(forced[:1]) <= set(tried)
        if not walk(matcher, 1, rng, ends=TOKENIZER.eos_token_ids):
            break


@pytest.mark.parametrize(
    "pattern", ["[a-c]{2,9}(x|yz)?", "(ab|cd)*e?", "[^z]{3,5}", "(?i)hello|world", "x?y*z+[0-9]{2}"]
)
def test_a_mask_equals_that_of_another_engine(pattern: str) -> None:
    """The other engine is the regex module: a partial match of the text with each token appended."""
    constraint = grammar_of(regex=pattern)
    compiled = regex.compile(pattern)
    table = TOKENIZER.pieces.table
    texts = {
        token: table[token] for token in table if token not in TOKENIZER.special_ids and isinstance(table[token], str)
    }
    for seed in range(3):
        matcher, text, rng = constraint.matcher(), "", random.Random(seed)
        for _ in range(6):
            right = {
                token for token, piece in texts.items() if piece and compiled.fullmatch(text + piece, partial=True)
            }
            actual = {token for token in allowed(matcher) if token in texts}
            assert actual == (right & set(matcher.jump_forward_tokens()[:1]) or right), text
            assert matcher.accepting == (compiled.fullmatch(text) is not None)
            if not actual:
                break
            token = rng.choice(sorted(actual))
            matcher.accept_token(token)
            text += texts[token]


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda constraint: constraint.to_json()[:40])
def test_copies_are_independent(constraint: StructuredOutputs) -> None:
    matcher, rng = bundled_compiler().compile(constraint).matcher(), random.Random(3)
    walk(matcher, 3, rng)
    before = mask_of(matcher)
    copies = [matcher.copy() for _ in range(6)]
    for one in copies:
        walk(one, 5, rng)
    assert np.array_equal(mask_of(matcher), before)


def test_the_end_of_a_text() -> None:
    ends = sorted(TOKENIZER.eos_token_ids)
    assert len(ends) == 2
    matcher = grammar_of(regex="ab?").matcher()
    a, b = tokens_of("a") + tokens_of("b")
    with pytest.raises(ValueError, match="not allowed"):
        matcher.accept_token(ends[0])  # too early
    assert (matcher.accepting, matcher.terminated) == (False, False)
    matcher.accept_token(a)
    assert (matcher.accepting, matcher.terminated) == (True, False)
    assert allowed(matcher) == sorted([*ends, b])
    early = matcher.copy()
    early.accept_token(ends[1])
    assert (early.accepting, early.terminated, allowed(early)) == (True, True, ends)
    with pytest.raises(ValueError, match=f"token {b} is not allowed"):
        early.accept_token(b)
    assert early.error is None
    for token in (b, *ends, *ends):
        matcher.accept_token(token)
        assert (matcher.accepting, matcher.terminated) == (True, True)
        assert (allowed(matcher), matcher.jump_forward_tokens()) == (ends, ())
        copy = matcher.copy()
        assert allowed(copy) == ends
        copy.accept_token(ends[0])
        assert copy.terminated


def test_a_rejected_token_changes_nothing() -> None:
    matcher = grammar_of(regex="[a-z]+").matcher()
    walk(matcher, 2, random.Random(0))
    before = mask_of(matcher)
    [digit] = tokens_of("7")
    for token in (digit, -1, 4096, 10**6, 2**40):
        with pytest.raises(ValueError, match="not allowed here"):
            matcher.accept_token(token)
    assert matcher.error is None
    assert np.array_equal(mask_of(matcher), before)


def test_jump_forward_tokens_are_the_usual_tokenization() -> None:
    constraint = StructuredOutputs(json_schema={"const": {"first_name": "hello world"}}, whitespace="none")
    matcher = bundled_compiler().compile(constraint).matcher()
    text = '{"first_name":"hello world"}'
    assert matcher.jump_forward_tokens() == tuple(tokens_of(text))
    for token in matcher.jump_forward_tokens():
        matcher.accept_token(token)
    assert matcher.jump_forward_tokens() == ()
    assert matcher.terminated
    assert grammar_of(regex="[ab]c").matcher().jump_forward_tokens() == ()


def test_an_invalid_array_is_rejected(grammars: GrammarCompiler) -> None:
    matcher = grammar_of(regex="a").matcher()
    frozen = np.zeros(128, np.int32)
    frozen.flags.writeable = False
    for wrong in (
        np.zeros(127, np.int32),
        np.zeros(128, np.int64),
        np.zeros((1, 128), np.int32),
        np.zeros(256, np.int32)[::2],
        frozen,
        [0],
    ):
        with pytest.raises(ValueError, match="masks must be"):
            matcher.fill_bitmask(wrong)
    with pytest.raises(ValueError, match="masks must be"):
        grammars.fill_all([matcher], np.zeros((2, 128), np.int32))
    with pytest.raises(ValueError, match="one row only"):
        grammars.fill_all([matcher, matcher], np.zeros((2, 128), np.int32))


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 32])
def test_batched_masks_equal_single_ones(grammars: GrammarCompiler, rows: int) -> None:
    rng = random.Random(rows)
    matchers: list[GrammarMatcher | None] = []
    for row in range(rows):
        matcher = bundled_compiler().compile(CONSTRAINTS[row % len(CONSTRAINTS)]).matcher()
        walk(matcher, rng.randrange(12), rng)
        matchers.append(None if row % 9 == 8 else matcher)
    for _ in range(4):
        masks_RW = np.full((rows, 128), 0x55555555, np.int32)
        grammars.fill_all(matchers, masks_RW)
        for matcher, mask_W in zip(matchers, masks_RW, strict=True):
            assert np.array_equal(mask_W, np.full(128, -1) if matcher is None else mask_of(matcher))
            if matcher is not None:
                walk(matcher, 1, rng)


def test_a_dead_end_is_a_permanent_error() -> None:
    """The text must continue with a letter that no token has."""
    grammars = compiler_of([*"abce"])
    matcher = grammars.compile(StructuredOutputs(regex="a(bd|ce)")).matcher()
    good = matcher.copy()
    for token in (0, 2):
        good.accept_token(token)
    matcher.accept_token(0)
    assert allowed(matcher) == [1, 2]
    matcher.accept_token(1)
    masks_RW = np.full((3, 1), -1, np.int32)
    grammars.fill_all([good, matcher, None], masks_RW)
    assert masks_RW[:, 0].tolist() == [0b1000, 0, -1]
    assert "no token of the vocabulary" in (matcher.error or "")
    assert (good.error, matcher.accepting, matcher.terminated) == (None, False, False)
    one = np.full(1, -1, np.int32)
    for call in (
        lambda: matcher.fill_bitmask(one),
        lambda: matcher.accept_token(2),
        matcher.jump_forward_tokens,
        matcher.copy,
    ):
        with pytest.raises(MatcherError, match="no token of the vocabulary"):
            call()
    grammars.fill_all([matcher], one[None])
    assert one[0] == 0
    with pytest.raises(ParameterError, match="regex: no token of the vocabulary"):
        grammars.compile(StructuredOutputs(regex="d"))


def test_exceeding_the_complexity_limit_is_an_error_of_its_row(grammars: GrammarCompiler) -> None:
    """Text without an end: the error occurs once its only continuation is accepted."""
    matcher = grammar_of(grammar='start: "b" | "a" endless\nendless: "a" endless').matcher()
    other = grammar_of(regex="[0-9]+").matcher()
    matcher.accept_token(tokens_of("a")[0])
    assert matcher.error is None
    with pytest.raises(MatcherError, match="Too many items"):
        walk(matcher, 3, random.Random(0))
    masks_RW = np.full((2, 128), -1, np.int32)
    grammars.fill_all([matcher, other], masks_RW)
    assert "Too many items" in matcher.error
    assert not masks_RW[0].any()
    assert np.array_equal(masks_RW[1], mask_of(other))


def panic() -> BaseException:
    """A real panic, which the engine raises for a token that is too long."""

    class Words:
        is_tokenizer_wrapper, bos_token_id, eos_token_id, special_token_ids = True, None, 0, (0,)
        tokens = (b"end", b"x" * 2000)

        def __call__(self, text: Any) -> list[int]:
            return []

    try:
        llguidance_library.library().LLTokenizer(Words(), n_vocab=2, eos_token=[0])
    except BaseException as error:  # noqa: BLE001 - it is no Exception
        return error
    raise AssertionError


def stand_in(inner: Any, ends_W: np.ndarray) -> GrammarMatcher:
    """A matcher with this LLMatcher."""
    first = SimpleNamespace(deep_copy=lambda: inner)
    return GrammarMatcher(InitialMatcher(lambda: first, frozenset({0}), ends_W, TimeBudget(1.0)))


class FailingMatcher:
    """A stand-in for an LLMatcher whose every call raises an error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def is_error(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        def call(*_: object) -> Any:
            raise self.error

        return call


def test_a_panic_of_the_engine_is_an_error_of_its_row(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = panic()
    assert not isinstance(error, Exception)
    ends_W = np.zeros(128, np.int32)
    calls = ("fill_bitmask", np.zeros(128, np.int32)), ("accept_token", 1), ("jump_forward_tokens",), ("copy",)
    for name, *arguments in calls:
        matcher = stand_in(FailingMatcher(error), ends_W)
        with pytest.raises(MatcherError, match="the grammar engine failed"):
            getattr(matcher, name)(*arguments)
        assert matcher.error == "the grammar engine failed"
    good = [grammars.compile(constraint).matcher() for constraint in CONSTRAINTS[:3]]
    bad = stand_in(FailingMatcher(error), ends_W)
    masks_RW = np.full((4, 128), -1, np.int32)

    class Executor:
        def unsafe_compute_mask_ptr(self, *_: object) -> None:
            raise error

    monkeypatch.setattr(grammars._engine, "_executor", Executor())
    grammars.fill_all([good[0], bad, *good[1:]], masks_RW)
    assert not masks_RW[1].any()
    assert bad.error == "the grammar engine failed"
    for matcher, row in zip(good, (0, 2, 3), strict=True):
        assert np.array_equal(masks_RW[row], mask_of(matcher))


def test_a_panic_while_compiling_is_a_parameter_error(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = panic()

    def fails(*_: object) -> Any:
        raise error

    monkeypatch.setattr(grammars._engine, "matcher", fails)
    with pytest.raises(ParameterError, match="regex: the grammar engine failed"):
        grammars.compile(StructuredOutputs(regex="panic"))


def test_a_stop_without_an_error_or_an_end_is_an_error() -> None:
    """Otherwise the engine's mask would allow EOS, and the text would be truncated silently."""

    class Stops(FailingMatcher):
        def is_stopped(self) -> bool:
            return True

        def is_accepting(self) -> bool:
            return False

        def unsafe_compute_mask_ptr(self, *_: object) -> None:
            pass

    matcher = stand_in(Stops(ValueError()), np.zeros(128, np.int32))
    with pytest.raises(MatcherError, match="no token of the vocabulary"):
        mask_of(matcher)
    with pytest.raises(MatcherError, match="no token of the vocabulary"):
        matcher.copy()


def test_other_exceptions_propagate() -> None:
    matcher = stand_in(FailingMatcher(KeyboardInterrupt()), np.zeros(1, np.int32))
    with pytest.raises(KeyboardInterrupt):
        matcher.jump_forward_tokens()
    assert matcher.error is None


class Clock:
    """A fake clock; calls advance it by a given time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.day = 0.0  # used to refill budgets
        monkeypatch.setattr(structured_output.grammar_matcher, "monotonic", lambda: self.day)
        matcher = structured_output.grammar_matcher
        monkeypatch.setattr(matcher, "_CPU_TIME", matcher._CpuTime())
        for module in (structured_output.compiler, structured_output.llguidance_engine, matcher):
            for name in ("thread_time", "perf_counter"):
                monkeypatch.setattr(module, name, lambda: self.now, raising=False)


class SlowMatcher:
    """A stand-in for an LLMatcher whose every call takes some seconds."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds, self.calls = clock, seconds, 0

    def is_error(self) -> bool:
        return False

    is_stopped = is_accepting = is_error

    def __getattr__(self, name: str) -> Any:
        def call(*_: object) -> Any:
            self.calls += 1
            self.clock.now += self.seconds
            return {"compute_ff_tokens": [], "try_consume_tokens": 1, "deep_copy": self}.get(name)

        return call


def test_a_slow_row_uses_its_own_budget_only(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, clock = GrammarCompiler(TOKENIZER, 4096), Clock(monkeypatch)
    ends_W = np.zeros(128, np.int32)
    seconds = [0.0, 0.1, 0.004, 0.0]  # the third stays within the free allowance
    inner = [SlowMatcher(clock, each) for each in seconds]
    rows = [stand_in(each, ends_W) for each in inner]
    batch_sizes = []

    class Executor:
        def unsafe_compute_mask_ptr(self, every: list[tuple[SlowMatcher, int]], *_: object) -> None:
            batch_sizes.append(len(every))
            for each, _row in every:
                each.compute()

    monkeypatch.setattr(grammars._engine, "_executor", Executor())
    masks_RW = np.empty((4, 128), np.int32)
    for step in range(12):
        masks_RW[:] = 1
        grammars.fill_all(rows, masks_RW)
        # one batch, in the first step, once the earlier rows have taken longer than it takes to wake threads
        assert batch_sizes == [2]
        remaining = [row.budget.remaining for row in rows]
        assert remaining == pytest.approx([1.0, 1.0 - 0.095 * min(step + 1, 11), 1.0, 1.0])
        assert [row.error is None for row in rows] == [True, step < 10, True, True]
        assert masks_RW.any(1).tolist() == [True, step < 10, True, True]
    assert "its masks took too long" in (rows[1].error or "")
    assert [each.calls for each in inner] == [12, 11, 12, 12]
    inner[0].seconds = 0.004
    for _ in range(70):
        grammars.fill_all(rows, masks_RW)
    assert batch_sizes == [2] * 71  # batched again, except for the first
    assert [row.budget.remaining for row in rows if row.error is None] == [1.0] * 3


def test_many_fast_rows_are_not_counted_as_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, clock = GrammarCompiler(TOKENIZER, 4096), Clock(monkeypatch)
    rows = [stand_in(SlowMatcher(clock, 0.001), np.zeros(128, np.int32)) for _ in range(40)]
    batch_sizes = []

    class Executor:
        def unsafe_compute_mask_ptr(self, every: list[tuple[SlowMatcher, int]], *_: object) -> None:
            batch_sizes.append(len(every))
            clock.now += 0.04

    monkeypatch.setattr(grammars._engine, "_executor", Executor())
    for _ in range(660):
        grammars.fill_all(rows, np.ones((40, 128), np.int32))
    assert 640 <= len(batch_sizes) < 660
    assert all(row.error is None and row.budget.remaining == 1.0 for row in rows)


@pytest.mark.parametrize("call", ["accept_token", "jump_forward_tokens", "copy"])
def test_every_call_uses_the_budget(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    matcher = stand_in(SlowMatcher(clock, 0.3), np.zeros(128, np.int32))
    arguments = {"accept_token": (1,)}.get(call, ())
    for _ in range(4):
        assert matcher.error is None
        getattr(matcher, call)(*arguments)
    with pytest.raises(MatcherError, match="its masks took too long"):
        getattr(matcher, call)(*arguments)
    with pytest.raises(MatcherError, match="its masks took too long"):
        matcher.fill_bitmask(np.zeros(128, np.int32))


def test_all_sequences_of_a_constraint_share_a_budget_that_refills(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, clock = GrammarCompiler(TOKENIZER, 4096), Clock(monkeypatch)
    inner = SlowMatcher(clock, 0.0)
    budget = TimeBudget(1.0)
    initial = InitialMatcher(lambda: inner, frozenset({0}), np.zeros(128, np.int32), budget)
    rows = [GrammarMatcher(initial) for _ in range(63)]
    rows.append(rows[0].copy())
    fast = GrammarMatcher(initial)
    fast.ll_matcher = SlowMatcher(clock, 0.001)
    for row in rows:
        row.ll_matcher = SlowMatcher(clock, 0.105)
    masks_RW = np.ones((64, 128), np.int32)
    grammars._time_each = True
    grammars.fill_all(rows, masks_RW)
    assert clock.now == pytest.approx(64 * 0.105)  # no row was known to be slow
    alive = [row for row in rows if row.error is None]
    assert len(alive) == 10
    grammars.fill_all(alive, masks_RW[:10])
    assert clock.now == pytest.approx(64 * 0.105)  # all of them were slow, and the budget is used up
    assert {row.error for row in rows} == {"the grammar is so ambiguous that its masks took too long"}
    mask_of(fast)
    assert fast.error is None  # a fast row continues
    assert budget.remaining == pytest.approx(1.0 - 6.4)
    clock.day += 60
    assert budget.remaining == pytest.approx(0.6)
    fast.ll_matcher = SlowMatcher(clock, 0.505)
    mask_of(fast)
    assert fast.error is None
    clock.day += 1000
    assert budget.remaining == 1.0


@pytest.mark.parametrize("call", ["fill_bitmask", "fill_all", "accept_token", "copy"])
def test_a_constraint_whose_states_are_used_up_is_recreated(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The states of the engine accumulate over all sequences."""
    limits = llguidance_library.library().LLParserLimits(max_lexer_states=1_500, verbose_errors=False)
    monkeypatch.setattr(structured_output.llguidance_engine, "parser_limits", lambda: limits)
    grammars, accepted_tokens = GrammarCompiler(TOKENIZER, 4096), []
    made = record_compilations(monkeypatch)
    constraint = StructuredOutputs(regex="[ab]*a[ab]{14}c")
    compiled, rng = grammars.compile(constraint), random.Random(0)
    letters = [tokens_of(letter)[0] for letter in "ab"]
    masks_RW = np.empty((2, 128), np.int32)
    longest_lived = compiled.matcher()
    for _ in range(30 if call == "accept_token" else 12):
        matcher, other = compiled.matcher(), compiled.matcher()
        for step in range(100):
            if call == "fill_bitmask":
                matcher.fill_bitmask(masks_RW[0])
            elif call == "fill_all":
                grammars.fill_all([matcher, other], masks_RW)
                assert np.array_equal(*masks_RW)
            elif call == "copy":
                matcher = matcher.copy()
                matcher.fill_bitmask(masks_RW[0])
            token = rng.choice(letters)
            matcher.accept_token(token)
            if call != "accept_token":
                other.accept_token(token)
            if step % 25 == 0:
                longest_lived.accept_token(token)
                accepted_tokens.append(token)
        assert matcher.error is None
    assert len(made) > 1
    assert grammars.compile(constraint) is compiled
    monkeypatch.undo()
    fresh = GrammarCompiler(TOKENIZER, 4096).compile(constraint).matcher()
    for token in accepted_tokens:
        fresh.accept_token(token)
    assert np.array_equal(mask_of(longest_lived), mask_of(fresh))


@pytest.mark.slow
def test_a_simple_pattern_is_not_too_complex_for_a_large_vocabulary() -> None:
    """A mask over many tokens needs many items, even for a simple constraint."""
    assert llguidance_library.parser_limits().step_max_items >= 50_000
    tokenizer = many_words()
    constraint = StructuredOutputs(regex="[a-z ]{1,500}")
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    assert len(allowed(grammars.compile(constraint).matcher())) > 60_000


def many_words() -> Tokenizer:
    rng = random.Random(0)
    words = {"".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=rng.randint(3, 12))) for _ in range(66_000)}
    return Tokenizer(byte_level(*words), eos_token_ids=[256])


def record_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record every grammar that the library compiles."""
    made: list[str] = []
    compiled = structured_output.llguidance_engine.LLGuidanceEngine.matcher

    def matcher(self: Any, text: str) -> Any:
        made.append(text)
        return compiled(self, text)

    monkeypatch.setattr(structured_output.llguidance_engine.LLGuidanceEngine, "matcher", matcher)
    return made


def test_a_sequence_that_uses_up_all_states_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = llguidance_library.library().LLParserLimits(max_lexer_states=400, verbose_errors=False)
    monkeypatch.setattr(structured_output.llguidance_engine, "parser_limits", lambda: limits)
    grammars, made = GrammarCompiler(TOKENIZER, 4096), record_compilations(monkeypatch)
    matcher, rng = grammars.compile(StructuredOutputs(regex="[ab]*a[ab]{14}c")).matcher(), random.Random(0)
    letters = [tokens_of(letter)[0] for letter in "ab"]
    one = np.empty(128, np.int32)
    for _ in range(600):
        try:
            matcher.fill_bitmask(one)
        except MatcherError:
            break
        matcher.accept_token(rng.choice(letters))
    assert len(made) == 3  # the second time one sequence used them all; the others restart anyway
    assert "too many states" in (matcher.error or "")


def byte_level(*added: str) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>", "<tool>"])
    backend.add_tokens([AddedToken(text, normalized=False) for text in added])
    return backend


@pytest.mark.parametrize(("length", "left_out"), [(1024, False), (1025, True), (5000, True)])
def test_a_token_too_long_for_the_engine_is_never_allowed(length: int, left_out: bool) -> None:
    tokenizer = Tokenizer(byte_level("x" * length), eos_token_ids=[256])
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    assert grammars.excluded_ids == ((258,) if left_out else ())
    matcher = grammars.compile(StructuredOutputs(regex="x*")).matcher()
    assert (258 in allowed(matcher)) is not left_out
    assert accepts(matcher, 258) is not left_out
    assert allowed(matcher)[:1] == [tokenizer.encode("x")[0]]


def test_special_tokens_are_not_text_but_can_be_named() -> None:
    tokenizer = Tokenizer(byte_level(), eos_token_ids=[256])
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    assert not {256, 257} & set(allowed(grammars.compile(StructuredOutputs(regex="<.*x")).matcher()))
    matcher = grammars.compile(StructuredOutputs(grammar='start: "a" <tool> "b"')).matcher()
    matcher.accept_token(tokenizer.encode("a")[0])
    assert allowed(matcher) == [257]
    # an EOS in the middle of the text
    named = grammars.compile(StructuredOutputs(grammar='start: "a" <end> "b"')).matcher()
    named.accept_token(tokenizer.encode("a")[0])
    assert allowed(named) == [256]
    named.accept_token(256)
    assert (named.accepting, allowed(named)) == (False, [*tokenizer.encode("b")])


def test_an_eos_that_looks_like_text_is_not_text() -> None:
    tokenizer = Tokenizer(byte_level("xx"), eos_token_ids=[258])
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    matcher = grammars.compile(StructuredOutputs(regex="x{2,4}")).matcher()
    assert 258 not in allowed(matcher)
    x = tokenizer.encode("x")[0]
    matcher.accept_token(x)
    assert 258 not in allowed(matcher)
    matcher.accept_token(x)
    assert allowed(matcher) == [x, 258]
    matcher.accept_token(258)
    assert matcher.terminated


@pytest.mark.parametrize("more", [0, 1, 31, 32, 33, 1000])
def test_ids_beyond_the_tokenizer_are_never_allowed(more: int) -> None:
    grammars = GrammarCompiler(TOKENIZER, 4096 + more)
    assert grammars.num_words == -(-(4096 + more) // 32)
    for constraint in CONSTRAINTS:
        matcher, rng = grammars.compile(constraint).matcher(), random.Random(more)
        for _ in range(12):
            assert max(allowed(matcher)) < 4096
            assert all(not accepts(matcher, token) for token in range(4096, 4096 + more, 97))
            walk(matcher, 1, rng)


def test_a_model_may_have_fewer_ids_than_the_tokenizer() -> None:
    grammars = GrammarCompiler(TOKENIZER, 300)
    matcher = grammars.compile(StructuredOutputs(choice=("the sunny day", "the rainy day"))).matcher()
    text = []
    while not matcher.terminated:
        assert max(allowed(matcher)) < 300
        assert all(token < 300 for token in matcher.jump_forward_tokens())
        text += walk(matcher, 1, random.Random(0))
    assert TOKENIZER.decode(text) in ("the sunny day", "the rainy day")


def test_an_unsupported_tokenizer_is_an_error() -> None:
    with pytest.raises(ValueError, match="with an EOS token"):
        GrammarCompiler(Tokenizer(byte_level()), 258)
    with pytest.raises(ValueError, match="with an EOS token"):
        GrammarCompiler(Tokenizer(byte_level(), eos_token_ids=[257]), 257)
    backend = byte_level()
    backend.decoder = decoders.BPEDecoder("</w>")
    with pytest.raises(ValueError, match="fixed byte sequence per token"):
        GrammarCompiler(Tokenizer(backend, eos_token_ids=[256]), 258)


@pytest.mark.parametrize(
    "name", ["byte-level", "llama", "gemma", "metaspace-always", "metaspace-never", "word-piece", "no-decoder", "fuse"]
)
def test_other_types_of_tokenizers(tokenizers_by_name: dict[str, Tokenizer], name: str) -> None:
    """The detokenizer's text after a prompt is checked."""
    backend = tokenizers_by_name[name]
    tokenizer = Tokenizer(backend.backend, eos_token_ids=[backend.backend.token_to_id("</s>")])
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    from nucleate.tokenization.detokenizer import Detokenizer

    prompt = next(token for token in tokenizer.pieces.table if token not in tokenizer.special_ids)
    shown = set()
    for seed in range(8):
        matcher = grammars.compile(StructuredOutputs(regex="[ a-z]{1,12}")).matcher()
        tokens = walk(matcher, 12, random.Random(seed), tokenizer.eos_token_ids)
        assert matcher.accepting
        detokenizer = Detokenizer(tokenizer, [prompt])
        text = "".join(map(detokenizer.push, tokens)) + detokenizer.close()
        assert regex.fullmatch("[ a-z]{1,12}", text), text
        shown.add(text)
        assert all(isinstance(token, int) for token in matcher.jump_forward_tokens())
    assert len(shown) > 1


def test_compiled_grammars_are_cached_and_the_oldest_evicted() -> None:
    grammars = GrammarCompiler(TOKENIZER, 4096, cache_bytes=600_000)
    first = grammars.compile(StructuredOutputs(regex="first"))
    assert grammars.compile(StructuredOutputs(regex="first")) is first
    for number in range(30):
        grammars.compile(StructuredOutputs(regex=f"{number}"))
        assert grammars.compile(StructuredOutputs(regex="first")) is first  # recently used, so it stays cached
        assert grammars._cached_bytes == sum(cached.num_bytes for cached in grammars._cache.values()) <= 600_000
    assert 2 < len(grammars._cache) < 10
    for number in range(10, 20):
        grammars.compile(StructuredOutputs(regex=f"{number}"))
    assert grammars.compile(StructuredOutputs(regex="first")) is not first
    assert first.matcher().jump_forward_tokens()  # an evicted grammar still works
    grammars.compile(StructuredOutputs(choice=[f"choice {i}" for i in range(2000)]))  # larger than the cache
    assert grammars._cached_bytes <= 600_000


@pytest.mark.slow
def test_many_threads_compile_the_same_grammar_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, count = GrammarCompiler(TOKENIZER, 4096), []
    compile_once = grammars._compile

    def slowly(structured_outputs: StructuredOutputs) -> CompiledGrammar:
        count.append(structured_outputs)
        time.sleep(0.5)
        return compile_once(structured_outputs)

    monkeypatch.setattr(grammars, "_compile", slowly)
    constraints = [StructuredOutputs(regex="same"), StructuredOutputs(regex="(")] * 8

    def compile_one(constraint: StructuredOutputs) -> object:
        try:
            return grammars.compile(constraint)
        except ParameterError as error:
            return str(error)

    with ThreadPoolExecutor(len(constraints)) as pool:
        made = [*pool.map(compile_one, constraints)]
    assert len(count) == 2
    assert len(set(made)) == 2
    assert made.count("regex: at offset 0: ( is never closed; close it with ), or write \\( for the character") == 8
    assert not grammars._in_progress
    with pytest.raises(ParameterError):
        grammars.compile(StructuredOutputs(regex="("))
    assert len(count) == 3  # an error is not cached


@pytest.mark.slow
def test_matchers_are_created_and_used_in_many_threads() -> None:
    compiled = bundled_compiler().compile(CONSTRAINTS[0])
    expected = mask_of(compiled.matcher()).tolist()

    def use(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(20):
            matcher = compiled.matcher()
            assert mask_of(matcher).tolist() == expected
            walk(matcher, 10, rng)

    with ThreadPoolExecutor(6) as pool:
        [*pool.map(use, range(6))]
