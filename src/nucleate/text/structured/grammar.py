"""Forms compiled for one vocabulary, kept for who asks again, and masks for many answers at once. Knows no model."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from nucleate.core.parameter import ParameterError
from nucleate.core.structured import Structured
from nucleate.text.structured.library import library, parser_limits, raise_unless_panic, told
from nucleate.text.structured.limits import Limits
from nucleate.text.structured.matcher import GuidanceMatcher, Matcher, MatcherError, check_masks
from nucleate.text.structured.schema import check_policy, places_of
from nucleate.text.structured.source import lark_text, source
from nucleate.text.structured.validate import MAX_SECONDS, validate
from nucleate.text.structured.vocabulary import Vocabulary
from nucleate.text.tokenizer import Tokenizer

CACHE_BYTES: Final = 64 * 2**20
SLOW_SECONDS: Final = 0.02
"""If the masks of a step take longer, each is timed."""


@final
class Compiled:
    """A form, ready for one vocabulary. ``ignored``: what the policy does not hold, keyword and place."""

    def __init__(
        self, structured: Structured, ignored: tuple[str, ...], first: GuidanceMatcher, words: int, size: int
    ) -> None:
        self.structured = structured
        self.ignored = ignored
        self.words = words
        """W, the length of a mask."""
        self.size = size
        """About how many bytes this takes."""
        self._first = first  # never moved, so that threads may copy it

    def matcher(self, *, ignore_eos: bool = False) -> Matcher:
        """The state of a new answer. Microseconds; from any thread. ignore_eos: EOS only where nothing else can be."""
        return self._first.begun(goes_on=ignore_eos)

    def validate(self, text: str, seconds: float = MAX_SECONDS) -> list[str]:
        """What is wrong with a whole text of JSON, held or ignored; see ``validate``."""
        return validate(self.structured, text, seconds)


@final
class Grammars:
    """All forms over the vocabulary of one model. Thread safe; made once, since it takes a second for 128k tokens.

    ``vocab_size`` is the length of the model's logits; ids that are no token are never allowed, nor are those of more
    than 1024 bytes, which the engine cannot hold (``left_out``). ``threads`` fill masks; None: 80 % of the processors.

    Raises ValueError for a tokenizer without EOS, or whose tokens have no bytes of their own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        limits: Limits | None = None,
        cache_bytes: int = CACHE_BYTES,
        threads: int | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._vocabulary = Vocabulary(tokenizer, vocab_size)
        self.left_out = self._vocabulary.left_out
        """Ids of tokens that are never allowed because they are too long."""
        self.words = len(self._vocabulary.ends_W)
        """W, the length of a mask."""
        self._executor = library().LLExecutor(num_threads=threads)
        self._slow = False  # the last masks were: they are filled one by one, so that each pays for its own
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[Structured, Compiled] = OrderedDict()
        self._size = 0
        self._under_way: dict[Structured, Future[Compiled]] = {}
        self._lock = threading.Lock()

    def compile(self, structured: Structured) -> Compiled:
        """Ready to use; milliseconds, or up to a second for what is just within the limits: not for an event loop.

        Who asks for what another thread is compiling waits for that. Raises ParameterError, which names the field.
        """
        with self._lock:
            kept = self._kept.get(structured)
            if kept is not None:
                self._kept.move_to_end(structured)
                return kept
            waiting = self._under_way.get(structured)
            if waiting is None:
                mine: Future[Compiled] = Future()
                self._under_way[structured] = mine
        if waiting is not None:
            return waiting.result()
        try:
            made = self._compile(structured)
        except BaseException as error:
            mine.set_exception(error)
            raise
        else:
            mine.set_result(made)
            return made
        finally:
            with self._lock:
                del self._under_way[structured]
                if mine.exception() is None:
                    self._keep(mine.result())

    def fill_all(self, matchers: Sequence[Matcher | None], masks_RW: NDArray[np.int32]) -> None:
        """``fill`` for a row each, in parallel and without Python's lock. A row of None is not restricted.

        A matcher in error, or that comes into it, gets a row in which nothing is allowed, and tells by ``error``; no
        row harms another. Raises ValueError for an array of another shape, or if a matcher is there twice.
        """
        check_masks(masks_RW, (len(matchers), self.words))
        if len({id(each) for each in matchers if each is not None}) < sum(each is not None for each in matchers):
            raise ValueError("a matcher can be in one row only")
        jobs: list[tuple[GuidanceMatcher, int]] = []
        for row, each in enumerate(matchers):
            if each is None:
                masks_RW[row] = -1
            elif isinstance(each, GuidanceMatcher) and each.error is None and not each.ended:
                jobs.append((each, row))
            else:
                _fill_or_forbid(each, masks_RW[row])
        begin = perf_counter()
        if len(jobs) > 1 and not self._slow:
            try:
                every = [(each.inner, row) for each, row in jobs]
                self._executor.unsafe_compute_mask_ptr(every, masks_RW.ctypes.data, 4 * self.words, len(matchers))
            except BaseException as error:  # noqa: BLE001 - a panic is no Exception, and does not tell its row
                raise_unless_panic(error)
            else:
                for each, row in jobs:
                    each.settle(masks_RW[row])
                self._slow = perf_counter() - begin > SLOW_SECONDS
                return
        for each, row in jobs:
            _fill_or_forbid(each, masks_RW[row])
        self._slow = perf_counter() - begin > SLOW_SECONDS

    def _compile(self, structured: Structured) -> Compiled:
        self.limits.check(structured)
        ignored = check_policy(structured.schema, structured.policy) if structured.json_schema is not None else ()
        if structured.grammar is not None:
            self.limits.check_grammar(lark_text(structured.grammar))
        text = _or_refused(structured, lambda: source(structured))
        inner = _or_refused(structured, lambda: self._vocabulary.matcher(text, parser_limits()))
        if inner.is_error():
            raise _refused(structured, inner.get_error())
        if structured.policy != "strict":
            ignored += _one_of_as_any_of(structured, inner.get_grammar_warnings())
        first = GuidanceMatcher(inner, self._vocabulary.ends, self._vocabulary.ends_W, self.limits.seconds)
        try:
            self._try(first)  # what cannot even begin is told now, and copies begin warm
        except (MatcherError, ValueError) as error:
            raise _refused(structured, str(error)) from None
        return Compiled(structured, ignored, first, self.words, _size(text))

    def _try(self, first: GuidanceMatcher) -> None:
        """Fill the first mask, and where it leaves no choice take the token: text without an end shows only then."""
        mask_W = np.empty(self.words, np.int32)
        first.fill(mask_W)
        bits = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little"))
        if len(bits) == 1:
            first.copy().push(int(bits[0]))

    def _keep(self, made: Compiled) -> None:
        self._kept[made.structured] = made
        self._size += made.size
        while self._size > self._cache_bytes and self._kept:
            self._size -= self._kept.popitem(last=False)[1].size


def _fill_or_forbid(each: Matcher, mask_W: NDArray[np.int32]) -> None:
    try:
        each.fill(mask_W)
    except MatcherError:
        mask_W[:] = 0


def _size(text: str) -> int:
    return 2**16 + 64 * len(text)


def _or_refused(structured: Structured, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ParameterError:
        raise
    except (ValueError, OverflowError) as error:
        raise _refused(structured, str(error)) from None
    except BaseException as error:  # noqa: BLE001 - a panic is no Exception
        raise_unless_panic(error)
        raise _refused(structured, "the grammar engine failed") from None


def _refused(structured: Structured, message: str) -> ParameterError:
    field = structured.form
    reason = told(message, place=field == "grammar")
    if field == "json_schema" and "oneOf" in reason:
        where = places_of(structured.schema, "oneOf")
        reason = f"cannot enforce oneOf, of which several may hold, at {where}; policy coerce would take it for anyOf"
    return ParameterError(field, f"{field}: {reason}")


def _one_of_as_any_of(structured: Structured, warnings: Sequence[str]) -> tuple[str, ...]:
    taken = any("oneOf" in warning for warning in warnings)
    return (f"oneOf, taken for anyOf, at {places_of(structured.schema, 'oneOf')}",) if taken else ()
