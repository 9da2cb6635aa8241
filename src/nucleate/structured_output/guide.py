"""``Guide``: the structured-output state of one sequence, with its token masks and the validation of its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np
from numpy.typing import NDArray

from nucleate.outputs import Finish, Validation
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stage import Pipeline, Shift, Tap, Transform
from nucleate.structured_output.compiler import CompiledGrammar, GrammarCompiler
from nucleate.structured_output.grammar_matcher import MatcherError
from nucleate.structured_output.spec import StructuredOutputs
from nucleate.structured_output.validation import load_validator

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
