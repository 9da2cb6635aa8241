"""Configuration of speculative decoding: draft method, number of draft tokens, acceptance rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nucleate.parameters.converters import shown
from nucleate.parameters.keywords import UnknownKeywordError, with_suggestions
from nucleate.parameters.parameter import ParameterError, invalid_value
from nucleate.speculative.acceptance import RULES
from nucleate.speculative.adaptive_proposer import AdaptiveProposer
from nucleate.speculative.draft import Proposer
from nucleate.speculative.ngram import NgramProposer
from nucleate.speculative.suffix import SuffixProposer

FIELD = "speculative_config"
"""The parameter that errors name."""

COUPLED = "coupled"
ACCEPTANCE_RULES = (COUPLED, *RULES)

TOKEN_METHODS = ("ngram", "suffix")
"""Draft methods that use token ids only, and work with every model."""

TRAINED_METHODS = ("draft", "medusa", "eagle", "dflash", "mtp")
"""Draft methods with weights that were trained for one model."""

METHODS = (*TOKEN_METHODS, *TRAINED_METHODS)

TREE_METHODS = ("suffix", "medusa", "eagle")

MODEL_METHODS = ("draft", "eagle", "medusa")
"""Those that take ``model``."""

MAX_DRAFT_TOKENS = 64


@with_suggestions
@dataclass(frozen=True)
class Speculation:
    """Speculative decoding of one engine. The output distribution is unchanged, except with the rule "typical".

    method: one of METHODS, or a function that returns a new ``Proposer`` for an engine.
    num_speculative_tokens: draft tokens per sequence and step, 1 to 64.
    acceptance_rule: "coupled" (shared-noise verification: the same tokens as without speculation, seed for seed),
    "rejection" (rejection sampling), "block" (block verification), or "typical" (typical acceptance, not exact).
    adaptive: draft fewer tokens, or none, where that saves no time.
    tree_width: maximum number of children of a node, 1 to 64. Above 1, the drafts of TREE_METHODS and of custom
    proposers are trees of ``num_speculative_tokens`` tokens in total. With "block", or if the model runner has no tree
    attention, only the first branch is verified.
    model: the draft model for "draft", with the vocabulary of the target: a folder, a Hugging Face id, or a model of
    Transformers in memory. For "eagle" and "medusa", a folder or Hugging Face id of heads in a public layout. None:
    those of the embedded model.
    Raises ParameterError.
    """

    method: str | Callable[[], Proposer] = "ngram"
    num_speculative_tokens: int = 4
    acceptance_rule: str = COUPLED
    adaptive: bool = True
    tree_width: int = 1
    model: Any = None

    def __post_init__(self) -> None:
        if not callable(self.method):
            _check_name("method", self.method, METHODS)
        _check_name("acceptance_rule", self.acceptance_rule, ACCEPTANCE_RULES)
        for name in ("num_speculative_tokens", "tree_width"):
            number = getattr(self, name)
            is_integer = isinstance(number, int | np.integer) and not isinstance(number, bool)
            if not is_integer or not 1 <= number <= MAX_DRAFT_TOKENS:
                raise invalid_value(name, f"an integer in 1..{MAX_DRAFT_TOKENS}", number, FIELD)
        if self.tree_width > 1 and not callable(self.method) and self.method not in TREE_METHODS:
            message = f"tree_width must be 1 for the method {self.method!r}, got {self.tree_width}"
            raise ParameterError(FIELD, f"{message}; only {', '.join(TREE_METHODS)} propose trees")
        if self.model is not None and self.method not in MODEL_METHODS and not callable(self.method):
            names = ", ".join(map(repr, MODEL_METHODS))
            raise ParameterError(FIELD, f"model is for the methods {names}, got it with {shown(self.method)}")
        if not isinstance(self.adaptive, bool):
            raise ParameterError(FIELD, f"adaptive must be True or False, got {shown(self.adaptive)}")

    @property
    def effective_tree_width(self) -> int:
        """``tree_width``, or 1 if the acceptance rule takes no trees."""
        rule = self.acceptance_rule
        return self.tree_width if rule == COUPLED or RULES[rule].trees else 1

    @classmethod
    def of(cls, value: Any) -> Speculation | None:
        """A configuration from the name of a method, a mapping of fields, or a Speculation; None stays None.

        Raises ParameterError.
        """
        if value is None or isinstance(value, Speculation):
            return value
        if isinstance(value, Mapping):
            try:
                return cls(**{str(name): one for name, one in value.items()})
            except UnknownKeywordError as error:
                raise ParameterError(FIELD, f"{FIELD}: {error}") from None
        if not isinstance(value, str):
            raise invalid_value(FIELD, "a method, a Speculation, a mapping of its fields or None", value)
        return cls(value)

    def bind_model(self, model: Any) -> Speculation:
        """Bind a trained method to the draft weights for a model. Raises ModelError if there are none."""
        if callable(self.method) or self.method in TOKEN_METHODS:
            return self
        from nucleate.speculative.neural import load, load_given

        name, tree_width = self.method, self.effective_tree_width
        if self.model is not None:
            return replace(self, method=load_given(name, self.model, model, tree_width), model=None)
        load(name, model, tree_width)  # fail here rather than in the first request
        return replace(self, method=lambda: load(name, model, tree_width))

    def create_proposer(self) -> Proposer:
        """Create a proposer. Raises ParameterError for a trained method without ``bind_model``."""
        tree_width = self.effective_tree_width
        if callable(self.method):
            proposer = self.method()
            if not hasattr(proposer, "layers"):
                raise ParameterError(FIELD, f"a proposer has layers and the methods of Proposer, got {shown(proposer)}")
        elif self.method in TOKEN_METHODS:
            proposer = SuffixProposer(tree_width=tree_width) if self.method == "suffix" else NgramProposer()
        else:
            raise ParameterError(FIELD, f"the method {self.method!r} needs the weights of a model: pass it to LLM")
        return AdaptiveProposer(proposer, trees=tree_width > 1) if self.adaptive else proposer


def _check_name(field: str, value: object, names: tuple[str, ...]) -> None:
    if value not in names:
        raise invalid_value(field, f"one of {', '.join(names)}", value, FIELD)
