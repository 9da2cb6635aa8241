"""The form of one answer while it is made: its matcher, its text, and what is told at its end. Knows no loop."""

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
"""How the message of an answer begins whose form did not let it go on: of the grammar, and of what stands beside it."""
VALIDATION_SECONDS = 0.1
"""Of an answer whose schema was not held in full."""


@final
class Guide:
    """What holds one answer to a form. ignore_eos: it goes on where EOS could end it, while anything can follow."""

    def __init__(self, form: CompiledGrammar, *, ignore_eos: bool = False) -> None:
        self.form, self.matcher = form, form.matcher(ignore_eos=ignore_eos)
        self._text: list[str] = []
        self._refused: str | None = None  # a token that the mask had allowed

    @property
    def error(self) -> str | None:
        """Why the answer cannot go on."""
        return self._refused or self.matcher.error

    def mask(self) -> NDArray[np.int32]:
        """The tokens that may come next [1, W]; none after an error."""
        mask_1W = np.empty((1, self.form.words), np.int32)
        try:
            self.matcher.fill(mask_1W[0])
        except MatcherError:
            mask_1W[:] = 0
        if self.error is not None:
            mask_1W[:] = 0
        return mask_1W

    def push(self, token: int) -> bool:
        """Take a token that was allowed. Whether nothing can follow it. An error shows in the next mask."""
        try:
            self.matcher.push(token)
            return self.matcher.stopped
        except MatcherError:
            return False
        except ValueError as error:  # never seen, and not worth the other answers
            self._refused = str(error)
            return False

    def forced(self) -> tuple[int, ...]:
        """The tokens that must follow, whatever the logits are."""
        try:
            return self.matcher.forced()
        except MatcherError:
            return ()

    def read(self, text: str, finish: Finish | None) -> Validation | None:
        """Take note of text that is shown. At its end: what the whole is worth, if its schema was not held in full."""
        if not self.form.ignored:
            return None
        self._text.append(text)
        if finish is None or finish.reason in ("abort", "error"):
            return None
        return Validation(self.form.ignored, tuple(self.form.validate("".join(self._text), VALIDATION_SECONDS)))


def why(error: str, guide: Guide | None) -> str:
    """Why an answer ends for which no token could be drawn."""
    if guide is None:
        return f"invalid logits: {error}"
    if guide.error is not None:
        return f"{CONSTRAINT_FAILED[0]}: {guide.error}"
    return f"{CONSTRAINT_FAILED[1]}: {error}"


def skippable(stages: Pipeline) -> bool:
    """Whether a token that must follow would be drawn anyway, and nothing is to be told of its logits."""
    return not any(
        isinstance(stage, Tap) or (isinstance(stage, Shift) and stage.touches not in ("seen", "output"))
        for stage in stages
    )


def form_of(spec: StructuredOutputs | None, grammars: Callable[[], GrammarCompiler]) -> CompiledGrammar | None:
    """A form that is asked for, compiled. Raises ParameterError, also where there can be none for this model."""
    if spec is None:
        return None
    try:
        known = grammars()
    except (ModuleNotFoundError, ValueError) as error:
        raise ParameterError("structured_outputs", str(error)) from None
    form = known.compile(spec)
    if form.ignored:
        try:
            load()  # not in the middle of an answer
        except ModuleNotFoundError as error:
            raise ParameterError("structured_outputs", str(error)) from None
    return form
