"""Speculation as it is asked for: who drafts, how many tokens, and by which rule they are kept. Knows no engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from nucleate.core.parameter import ParameterError
from nucleate.core.values import shown
from nucleate.engine.draft.adaptive import AdaptiveProposer
from nucleate.engine.draft.draft import Proposer
from nucleate.engine.draft.ngram import NgramProposer
from nucleate.engine.draft.suffix import SuffixProposer
from nucleate.engine.verify import RULES

FIELD = "speculative"
"""What errors name."""

COUPLED = "coupled"
RULE_NAMES = (COUPLED, *RULES)

PLAIN: Mapping[str, Callable[[], Proposer]] = MappingProxyType({"ngram": NgramProposer, "suffix": SuffixProposer})
"""Proposers that look at tokens only."""

TRAINED = ("draft", "medusa", "eagle", "dflash")
"""Proposers that were trained for a model."""

NAMES = (*PLAIN, *TRAINED)

MOST_TOKENS = 64
"""Of a draft."""


@dataclass(frozen=True)
class Speculation:
    """How an engine drafts tokens. The text stays what it is; with any rule but "typical" its law does.

    proposer: one of NAMES, or a function that makes a ``Proposer``, a new one for each engine. tokens: how many are
    drafted for a sequence at a time, 1 to 64. rule: "coupled" draws as without drafts, seed for seed; "rejection" and
    "block" draw from the same law with other noise; "typical" does not. adaptive: fewer tokens, or none, where
    drafts do not pay. Raises ParameterError.
    """

    proposer: str | Callable[[], Proposer] = "ngram"
    tokens: int = 4
    rule: str = COUPLED
    adaptive: bool = True

    def __post_init__(self) -> None:
        if not callable(self.proposer):
            _known("the proposer", self.proposer, NAMES)
        _known("the rule", self.rule, RULE_NAMES)
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int | np.integer):
            raise ParameterError(FIELD, f"the tokens of a draft must be an integer, got {shown(self.tokens)}")
        if not 1 <= self.tokens <= MOST_TOKENS:
            raise ParameterError(FIELD, f"the tokens of a draft must be in 1..{MOST_TOKENS}, got {self.tokens}")
        if not isinstance(self.adaptive, bool):
            raise ParameterError(FIELD, f"adaptive must be True or False, got {shown(self.adaptive)}")

    @classmethod
    def of(cls, asked: Any) -> Speculation | None:
        """What was asked for: a name, a Speculation, or None for none. Raises ParameterError."""
        if asked is None or isinstance(asked, Speculation):
            return asked
        if not isinstance(asked, str):
            raise ParameterError(FIELD, f"{FIELD} must be a name, a Speculation or None, got {shown(asked)}")
        return cls(asked)

    def on(self, model: Any) -> Speculation:
        """The same for one model, for which a trained proposer is found. Raises ModelError if it has none."""
        if callable(self.proposer) or self.proposer in PLAIN:
            return self
        from nucleate.engine.draft.neural import load

        name = self.proposer
        load(name, model)  # now, not with the first request
        return replace(self, proposer=lambda: load(name, model))

    def make(self) -> Proposer:
        """A new proposer. Raises ParameterError for one that needs a model, see ``on``."""
        if callable(self.proposer):
            made = self.proposer()
        elif self.proposer in PLAIN:
            made = PLAIN[self.proposer]()
        else:
            raise ParameterError(FIELD, f"the proposer {self.proposer!r} needs to know the model: ask for it with LLM")
        return AdaptiveProposer(made) if self.adaptive else made


def _known(what: str, value: object, names: tuple[str, ...]) -> None:
    if value not in names:
        raise ParameterError(FIELD, f"{what} must be one of {', '.join(names)}, got {shown(value)}")
