"""``Guide`` and ``GrammarManager``: the structured-output state of one sequence, and the masks of an engine's steps.

A guide has the token masks of a sequence and the validation of its text. The manager compiles the constraints of
requests and fills the masks of each step. The compiler, and with it llguidance, is loaded with the first constrained
request.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from time import perf_counter
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from nucleate.outputs import Finish, Validation
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stage import Pipeline, Shift, Tap, Transform
from nucleate.structured_output.compiler import CompiledGrammar, GrammarCompiler
from nucleate.structured_output.grammar_limits import GrammarLimits
from nucleate.structured_output.grammar_matcher import MatcherError, mark_cpu_time
from nucleate.structured_output.spec import StructuredOutputs, Whitespace
from nucleate.structured_output.validation import load_validator
from nucleate.tokenization.tokenizer import Tokenizer

CONSTRAINT_FAILED = (
    "the output cannot satisfy its structured-output constraint",
    "no token satisfies the structured-output constraint",
)
"""Prefixes of the error message of a sequence that its grammar ended, alone or together with other token bans."""
VALIDATION_SECONDS = 0.1
"""Maximum time to validate an output whose schema has ignored keywords, in seconds."""


@final
class Guide:
    """The constraint of one sequence. ignore_eos: allow EOS only if no other token is allowed."""

    def __init__(self, grammar: CompiledGrammar, *, ignore_eos: bool = False) -> None:
        self.grammar, self.matcher = grammar, grammar.matcher(ignore_eos=ignore_eos)
        self._text: list[str] = []
        self._rejection: str | None = None  # the error if the matcher rejects a token that the mask allowed

    @property
    def error(self) -> str | None:
        """Why the sequence cannot continue, or None."""
        return self._rejection or self.matcher.error

    def mask(self) -> NDArray[np.int32]:
        """Return the bitmask [1, W] of the allowed next tokens; all zero after an error."""
        mask_1W = np.empty((1, self.grammar.num_words), np.int32)
        try:
            self.matcher.fill_bitmask(mask_1W[0])
        except MatcherError:
            mask_1W[:] = 0
        if self.error is not None:
            mask_1W[:] = 0
        return mask_1W

    def accept_token(self, token: int) -> bool:
        """Advance by a sampled token. Returns whether the output is complete. An error clears the next mask."""
        try:
            self.matcher.accept_token(token)
            return self.matcher.terminated
        except MatcherError:
            return False
        except ValueError as error:  # unexpected: end only this sequence
            self._rejection = str(error)
            return False

    def jump_forward_tokens(self) -> tuple[int, ...]:
        """Return the next tokens if they are determined, for jump-forward decoding."""
        try:
            return self.matcher.jump_forward_tokens()
        except MatcherError:
            return ()

    def add_text(self, text: str, finish: Finish | None) -> Validation | None:
        """Record generated text. At its end, return its validation if the schema has ignored or unknown keywords.

        Unknown keywords are named only: the text obeys the schema without them.
        """
        grammar = self.grammar
        if not (grammar.ignored or grammar.unknown):
            return None
        if grammar.ignored:
            self._text.append(text)
        if finish is None or finish.reason in ("abort", "error"):
            return None
        errors = grammar.validate("".join(self._text), VALIDATION_SECONDS) if grammar.ignored else ()
        return Validation((*grammar.ignored, *grammar.unknown), tuple(errors), grammar.unchecked)


def error_message(error: str, guide: Guide | None) -> str:
    """Return the error message for a sequence that has no token to sample. error: the error of the sampler."""
    if guide is None:
        return f"invalid logits: {error}"
    if guide.error is not None:
        return f"{CONSTRAINT_FAILED[0]}: {guide.error}"
    return f"{CONSTRAINT_FAILED[1]}: {error}"


def can_jump_forward(stages: Pipeline) -> bool:
    """Return whether jump-forward tokens need no logits: no stage could ban them, and none reports logprobs."""
    return not any(
        isinstance(stage, Tap | Transform) or (isinstance(stage, Shift) and stage.touches not in ("seen", "output"))
        for stage in stages
    )


def compile_grammar(
    spec: StructuredOutputs | None, get_compiler: Callable[[], GrammarCompiler]
) -> CompiledGrammar | None:
    """Compile the constraint of a request, if any. Raises ParameterError, also if the model does not support it."""
    if spec is None:
        return None
    try:
        compiler = get_compiler()
    except (ModuleNotFoundError, ValueError) as error:
        raise ParameterError("structured_outputs", str(error)) from None
    try:
        grammar = compiler.compile(spec)
    except RecursionError:
        raise ParameterError("structured_outputs", "structured_outputs is nested too deeply") from None
    if grammar.ignored:
        try:
            load_validator()  # now, so that a missing package is an error of the request
        except ModuleNotFoundError as error:
            raise ParameterError("structured_outputs", str(error)) from None
    return grammar


OVERLAP_SECONDS = 0.0005
"""If the masks of a step take longer, those of the next step are filled on another thread during the forward pass."""


class GrammarManager:
    """Constraints and masks of one engine. ``seconds``: total time spent waiting for masks."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        limits: GrammarLimits | None,
        whitespace: Whitespace = "flexible",
    ) -> None:
        self.seconds = 0.0
        self.is_slow = False  #: whether the last masks took so long that it pays to prefetch the next ones
        self._create: Callable[[], GrammarCompiler] = partial(
            GrammarCompiler, tokenizer, vocab_size, limits=limits, whitespace=whitespace
        )
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()
        self._masks_RW = np.empty((0, 0), np.int32)
        self._thread = ThreadPoolExecutor(1, "nucleate-masks")
        self._prefetch: _Prefetch | None = None

    def compile(self, spec: StructuredOutputs | None) -> CompiledGrammar | None:
        """Compile the constraint of a request, on any thread. Raises ParameterError."""
        return compile_grammar(spec, self._get_compiler)

    def prefetch(self, guides: Sequence[Guide | None]) -> None:
        """Start filling the masks of these sequences during a forward pass."""
        if self._prefetch is not None:  # unused
            wait([self._prefetch.future])
            self._prefetch = None
        if any(guides):
            self._prefetch = _Prefetch(guides, self._thread.submit(self._fill, guides, overlapped=True))

    def mask(self, guides: Sequence[Guide | None]) -> NDArray[np.int32] | None:
        """Return the bitmasks [R, W] of the next tokens; None if no sequence is constrained."""
        if self._compiler is None or not any(guides):
            return None  # prefetched masks are of other sequences
        prefetch, self._prefetch = self._prefetch, None
        mark_cpu_time()  # for the calls after this one: masks may be filled on another thread
        begin = perf_counter()
        masks_RW = None if prefetch is None else prefetch.masks(guides)
        if masks_RW is None:
            masks_RW = self._fill(guides)
        for row, guide in enumerate(guides):
            if guide is not None and guide.error is not None:
                masks_RW[row] = 0
        self.seconds += perf_counter() - begin
        return masks_RW

    def _fill(self, guides: Sequence[Guide | None], *, overlapped: bool = False) -> NDArray[np.int32]:
        begin, compiler = perf_counter(), self._get_compiler()
        if len(self._masks_RW) < len(guides):
            self._masks_RW = np.empty((len(guides), compiler.num_words), np.int32)
        masks_RW = self._masks_RW[: len(guides)]
        compiler.fill_all(
            [None if guide is None else guide.matcher for guide in guides], masks_RW, overlapped=overlapped
        )
        self.is_slow = compiler.parallel and perf_counter() - begin > OVERLAP_SECONDS
        return masks_RW

    def _get_compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._create()
            return self._compiler


class _Prefetch(NamedTuple):
    """Masks that are being filled on another thread."""

    guides: Sequence[Guide | None]
    future: Future[NDArray[np.int32]]

    def masks(self, guides: Sequence[Guide | None]) -> NDArray[np.int32] | None:
        """Return the masks of these sequences, a subset of the prefetched ones; None if one is missing."""
        masks_RW = self.future.result()
        if len(guides) == len(self.guides) and all(map(operator.is_, guides, self.guides)):
            return masks_RW
        row_of = {id(guide): row for row, guide in enumerate(self.guides)}
        rows = [row_of.get(id(guide), -1) for guide in guides]
        return None if -1 in rows else masks_RW[rows]
