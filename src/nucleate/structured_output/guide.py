"""Guides one sequence: the masks of its matcher, and the validation of its text at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np
from numpy.typing import NDArray

from nucleate.outputs import Finish, Validation
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stage import Pipeline, Shift, Tap
from nucleate.structured_output.compiler import CompiledGrammar, GrammarCompiler
from nucleate.structured_output.grammar_matcher import MatcherError
from nucleate.structured_output.spec import StructuredOutputs
from nucleate.structured_output.validation import load

CONSTRAINT_FAILED = (
    "the output cannot satisfy its structured-output constraint",
    "no token satisfies the structured-output constraint",
)
"""The start of the error message of a sequence that ended because of its grammar, or of it and other token bans."""
VALIDATION_SECONDS = 0.1
"""Maximum time to validate an output whose schema has ignored keywords."""


@final
class Guide:
    """The constraint of one sequence. ignore_eos: continue where EOS could end it, while another token is allowed."""

    def __init__(self, form: CompiledGrammar, *, ignore_eos: bool = False) -> None:
        self.form, self.matcher = form, form.matcher(ignore_eos=ignore_eos)
        self._text: list[str] = []
        self._refused: str | None = None  # the error for a token that the mask had allowed

    @property
    def error(self) -> str | None:
        """Why the sequence cannot continue, or None."""
        return self._refused or self.matcher.error

    def mask(self) -> NDArray[np.int32]:
        """Return the mask [1, W] of the next token; empty after an error."""
        mask_1W = np.empty((1, self.form.words), np.int32)
        try:
            self.matcher.fill(mask_1W[0])
        except MatcherError:
            mask_1W[:] = 0
        if self.error is not None:
            mask_1W[:] = 0
        return mask_1W

    def push(self, token: int) -> bool:
        """Accept an allowed token; return whether nothing can follow it. An error makes the next mask empty."""
        try:
            self.matcher.push(token)
            return self.matcher.stopped
        except MatcherError:
            return False
        except ValueError as error:  # unexpected: end only this sequence
            self._refused = str(error)
            return False

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that must follow, for jump-forward decoding."""
        try:
            return self.matcher.forced()
        except MatcherError:
            return ()

    def read(self, text: str, finish: Finish | None) -> Validation | None:
        """Record generated text. At its end, return the validation if keywords of the schema were ignored."""
        if not self.form.ignored:
            return None
        self._text.append(text)
        if finish is None or finish.reason in ("abort", "error"):
            return None
        return Validation(self.form.ignored, tuple(self.form.validate("".join(self._text), VALIDATION_SECONDS)))


def why(error: str, guide: Guide | None) -> str:
    """Return the error message of a sequence for which no token can be sampled."""
    if guide is None:
        return f"invalid logits: {error}"
    if guide.error is not None:
        return f"{CONSTRAINT_FAILED[0]}: {guide.error}"
    return f"{CONSTRAINT_FAILED[1]}: {error}"


def skippable(stages: Pipeline) -> bool:
    """Return whether determined tokens need no logits: no stage could ban them, and none reports logprobs."""
    return not any(
        isinstance(stage, Tap) or (isinstance(stage, Shift) and stage.touches not in ("seen", "output"))
        for stage in stages
    )


def form_of(spec: StructuredOutputs | None, grammars: Callable[[], GrammarCompiler]) -> CompiledGrammar | None:
    """Compile the constraint of a request, if any. Raises ParameterError, also if the model does not support it."""
    if spec is None:
        return None
    try:
        known = grammars()
    except (ModuleNotFoundError, ValueError) as error:
        raise ParameterError("structured_outputs", str(error)) from None
    grammar = known.compile(spec)
    if grammar.ignored:
        try:
            load()  # not during generation
        except ModuleNotFoundError as error:
            raise ParameterError("structured_outputs", str(error)) from None
    return grammar
