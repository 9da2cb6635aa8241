"""Speculation as it is asked for: who drafts, how many tokens, and by which rule they are kept. Knows no engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.speculative.acceptance import RULES
from nucleate.speculative.adaptive.controller import AdaptiveProposer
from nucleate.speculative.draft import Proposer
from nucleate.speculative.proposers.ngram import NgramProposer
from nucleate.speculative.proposers.suffix import SuffixProposer

FIELD = "speculative_config"
"""What errors name."""

COUPLED = "coupled"
RULE_NAMES = (COUPLED, *RULES)

PLAIN: Mapping[str, Callable[[], Proposer]] = MappingProxyType({"ngram": NgramProposer, "suffix": SuffixProposer})
"""Proposers that look at tokens only."""

TRAINED = ("draft", "medusa", "eagle", "dflash", "mtp")
"""Proposers that were trained for a model."""

NAMES = (*PLAIN, *TRAINED)

TREES = ("suffix", "medusa", "eagle")
"""Proposers whose drafts may have branches."""

MOST_TOKENS = 64
"""Of a draft."""


@dataclass(frozen=True)
class Speculation:
    """How an engine drafts tokens. The text stays what it is; with any rule but "typical" its law does.

    proposer: one of NAMES, or a function that makes a ``Proposer``, a new one for each engine. tokens: how many are
    drafted for a sequence at a time, 1 to 64. rule: "coupled" draws as without drafts, seed for seed; "rejection" and
    "block" draw from the same law with other noise; "typical" does not. adaptive: fewer tokens, or none, where
    drafts do not pay. branches: the most tokens of a draft that follow the same one, 1 to 64: with more than one, the
    drafts of TREES, or of a proposer of one's own, are trees, of so many ``tokens`` in all. "block" reads their first
    branch, and so does a model whose runner has no ``branches``. Raises ParameterError.
    """

    proposer: str | Callable[[], Proposer] = "ngram"
    tokens: int = 4
    rule: str = COUPLED
    adaptive: bool = True
    branches: int = 1

    def __post_init__(self) -> None:
        if not callable(self.proposer):
            _known("the proposer", self.proposer, NAMES)
        _known("the rule", self.rule, RULE_NAMES)
        for what, number in (("tokens", self.tokens), ("branches", self.branches)):
            whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
            if not whole or not 1 <= number <= MOST_TOKENS:
                message = f"the {what} of a draft must be an integer in 1..{MOST_TOKENS}, got {shown(number)}"
                raise ParameterError(FIELD, message)
        if self.branches > 1 and not callable(self.proposer) and self.proposer not in TREES:
            message = f"drafts of {self.proposer!r} have one branch, got {self.branches} branches"
            raise ParameterError(FIELD, f"{message}; those of {', '.join(TREES)} may have more")
        if not isinstance(self.adaptive, bool):
            raise ParameterError(FIELD, f"adaptive must be True or False, got {shown(self.adaptive)}")

    @property
    def wide(self) -> int:
        """The branches that drafts have, as the rule takes them."""
        return self.branches if self.rule == COUPLED or RULES[self.rule].trees else 1

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
        from nucleate.speculative.proposers.neural import load

        name, wide = self.proposer, self.wide
        load(name, model, wide)  # now, not with the first request
        return replace(self, proposer=lambda: load(name, model, wide))

    def make(self) -> Proposer:
        """A new proposer. Raises ParameterError for one that needs a model, see ``on``."""
        if callable(self.proposer):
            made = self.proposer()
            if not hasattr(made, "layers"):
                raise ParameterError(FIELD, f"a proposer has layers and the methods of Proposer, got {shown(made)}")
        elif self.proposer in PLAIN:
            made = SuffixProposer(branches=self.wide) if self.proposer == "suffix" else PLAIN[self.proposer]()
        else:
            raise ParameterError(FIELD, f"the proposer {self.proposer!r} needs to know the model: ask for it with LLM")
        return AdaptiveProposer(made, trees=self.wide > 1) if self.adaptive else made


def _known(what: str, value: object, names: tuple[str, ...]) -> None:
    if value not in names:
        raise ParameterError(FIELD, f"{what} must be one of {', '.join(names)}, got {shown(value)}")
