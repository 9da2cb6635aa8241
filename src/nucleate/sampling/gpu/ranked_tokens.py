"""Rows sorted by score, the statistics of their surviving tokens, and the stages that filter them.

R rows of N = V tokens. A token that does not survive has the score -inf, so that no shape depends on a value. The
scores of an invalid row (NaN, +inf or no finite score) relative to its maximum are NaN, so no token is selected. The
rules of a stage are bound to the parameters of many rows, so that one call computes all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nucleate.sampling.noise import GROUP_SIZE
from nucleate.sampling.rules import ReplaceRecorder
from nucleate.sampling.signature import RuleSignature, StageSignature
from nucleate.sampling.stage import RowStats


class RowConstants:
    """Constant tensors, created once per batch. needs_full_mass: whether any rule reads ``RowStats.full_mass``."""

    def __init__(
        self, size: int, rows: int, floats: torch.dtype, device: Any, *, needs_full_mass: bool = False
    ) -> None:
        self.floats, self.needs_full_mass = floats, needs_full_mass
        self.zero_1 = torch.zeros(1, dtype=floats, device=device)
        self.zero, self.neg_inf = (torch.tensor(x, dtype=floats, device=device) for x in (0.0, -torch.inf))
        self.no_token = torch.tensor(-1, device=device)
        self.position_N = torch.arange(size, device=device)
        self.first_N = self.position_N == 0
        self.zero_R1 = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.true_R1 = torch.ones(rows, 1, dtype=torch.bool, device=device)
        self.groups_G = torch.arange(-(-size // GROUP_SIZE), device=device)
        self.token_T = torch.arange(GROUP_SIZE, device=device)
        self.word_N, self.bit_N = self.position_N // 32, (self.position_N % 32).to(torch.int32)
        neg_inf_11 = torch.full((1, 1), -torch.inf, dtype=floats, device=device)
        self.neg_inf_RP = neg_inf_11.expand(rows, len(self.groups_G) * GROUP_SIZE)


@dataclass(frozen=True)
class RankedTokens:
    """Tokens in rank order: score descending, then id ascending. Filters are recorded, and applied when needed."""

    constants: RowConstants
    ids_RN: torch.Tensor  #: int64, a permutation of 0..V - 1
    x_RN: torch.Tensor  #: scores after the last Shift or Scale, also of masked tokens
    below_RN: torch.Tensor  #: the same minus the maximum of the survivors; -inf for masked tokens
    is_sorted: bool = True  #: whether the survivors come first
    cut_floor_R1: Any = None  #: pending filter: keeps values of ``below_RN`` from here on
    floor_below_top: bool = True  #: whether that is at most 0 for certain; if not, the first token is kept in any case
    cut_last_R1: Any = None  #: pending filter: keeps positions 0 to this one
    full_mass_R1: Any = None  #: the mass before the first filter, if there was one
    _cache: dict[str, torch.Tensor] = field(default_factory=dict)

    def _cached(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]

    def surviving(self) -> torch.Tensor:
        return self._cached("inside", lambda: self.below_RN > -torch.inf)

    def weight(self) -> torch.Tensor:
        return self._cached("weight", self.below_RN.exp)

    def mass(self) -> torch.Tensor:
        return self._cached("mass", lambda: self.weight().sum(1, keepdim=True))

    def with_cut(self, *, floor: Any = None, floor_below_top: bool = True, last: Any = None) -> RankedTokens:
        """Record one more filter: a lowest value of ``below_RN``, or a last position."""
        floor = _tighter(torch.maximum, self.cut_floor_R1, floor)
        last = _tighter(torch.minimum, self.cut_last_R1, last)
        return replace(
            self, cut_floor_R1=floor, floor_below_top=floor_below_top and self.floor_below_top, cut_last_R1=last
        )

    def apply_cuts(self) -> RankedTokens:
        """Apply the pending filters."""
        if self.cut_floor_R1 is None:
            return self if self.cut_last_R1 is None else self.filtered(self.constants.position_N <= self.cut_last_R1)
        keep_RN = self.below_RN >= self.cut_floor_R1
        if not self.floor_below_top:
            keep_RN = keep_RN | self.constants.first_N
        if self.cut_last_R1 is not None:
            keep_RN = keep_RN & (self.constants.position_N <= self.cut_last_R1)
        return self.filtered(keep_RN)

    def filtered(self, keep_RN: Any, *, is_sorted: bool = True) -> RankedTokens:
        """Keep the tokens of a mask. is_sorted: they are a prefix of the survivors."""
        below_RN, full_mass_R1 = torch.where(keep_RN, self.below_RN, self.constants.neg_inf), self.full_mass_R1
        if full_mass_R1 is None and self.constants.needs_full_mass:
            full_mass_R1 = self.mass()
        if not is_sorted:
            top_R1 = below_RN.amax(1, keepdim=True)
            below_RN = below_RN - top_R1
            full_mass_R1 = None if full_mass_R1 is None else full_mass_R1 * (-top_R1).exp()
        return RankedTokens(self.constants, self.ids_RN, self.x_RN, below_RN, is_sorted, full_mass_R1=full_mass_R1)

    def resorted(self) -> RankedTokens:
        """Move the survivors to the front."""
        if self.is_sorted:
            return self
        below_RN, order_RN = torch.sort(self.below_RN, dim=1, descending=True, stable=True)
        ids_RN, x_RN = self.ids_RN.gather(1, order_RN), self.x_RN.gather(1, order_RN)
        return RankedTokens(self.constants, ids_RN, x_RN, below_RN, full_mass_R1=self.full_mass_R1)

    def by_id(self, x_RN: torch.Tensor) -> torch.Tensor:
        """Reorder values by token id, padded with -inf: [R, groups * 256]."""
        return self.constants.neg_inf_RP.scatter(1, self.ids_RN, x_RN)

    def logprob(self, tokens_R1: torch.Tensor) -> torch.Tensor:
        """The log-probabilities of surviving tokens: [R, 1]."""
        position_R1 = (self.ids_RN == tokens_R1).to(torch.int8).argmax(1, keepdim=True)
        return self.below_RN.gather(1, position_R1) - self.mass().log()

    def stats(self, names: frozenset[str], sorted_count: int = 0) -> RowStats:
        """The named row statistics, [R, 1] each, relative to the maximum score; the others are 1.

        The sorted scores are [R, sorted_count]; for them, the tokens must be sorted and without pending filters.
        """
        stats_of: dict[str, Any] = dict.fromkeys(RowStats._fields, 1.0)
        surviving_RN, below_RN = None, self.below_RN
        if names & {"n", "mean", "var"}:
            surviving_RN = self.surviving()
            stats_of["n"] = self._cached("n", lambda: surviving_RN.sum(1, keepdim=True))
        if names & {"mass", "entropy", "full_mass"}:
            stats_of["mass"] = self.mass()
        if "square" in names:
            stats_of["square"] = self._cached("square", lambda: self.weight().square().sum(1, keepdim=True))
        if "entropy" in names:
            stats_of["entropy"] = self._cached("entropy", self._entropy)
        if names & {"mean", "var"}:
            below_RN = torch.where(surviving_RN, below_RN, self.constants.zero)
            stats_of["mean"] = below_RN.sum(1, keepdim=True) / stats_of["n"]
            if "var" in names:
                away_RN = torch.where(surviving_RN, below_RN - stats_of["mean"], self.constants.zero)
                stats_of["var"] = away_RN.square().sum(1, keepdim=True) / stats_of["n"]
        if "full_mass" in names:
            full_R1 = self.full_mass_R1
            stats_of["full_mass"] = self.mass() if full_R1 is None else torch.maximum(full_R1, self.mass())
        if "n" in names:
            stats_of["n"] = stats_of["n"].to(self.constants.floats)
        if "sorted_scores" in names:
            missing = max(sorted_count - self.below_RN.shape[1], 0)
            scores_RN = self.below_RN[:, :sorted_count]
            stats_of["sorted_scores"] = torch.nn.functional.pad(scores_RN, (0, missing), value=-torch.inf)
        return RowStats(**{**stats_of, "top": 0.0})

    def _entropy(self) -> torch.Tensor:
        least = torch.finfo(self.constants.floats).min  # 0 * -inf would be NaN
        cross_R1 = (self.weight() * self.below_RN.clamp(min=least)).sum(1, keepdim=True)
        return self.mass().log() - cross_R1 / self.mass()


def _tighter(choose: Callable[..., torch.Tensor], first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    return choose(first, second)


def rank_tokens(constants: RowConstants, x_RV: torch.Tensor) -> RankedTokens:
    """Sort scores that are given by token id."""
    x_RN, ids_RN = torch.sort(x_RV, dim=1, descending=True, stable=True)
    return RankedTokens(constants, ids_RN, x_RN, x_RN - x_RN.narrow(1, 0, 1))


class BoundAttributes(ReplaceRecorder):
    """The ``self`` that rules receive: the parameters as tensors."""

    def __init__(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class BoundStage:
    """A stage of many rows. Rules read numeric parameters as tensors [R, 1]; the other attributes are shared."""

    def __init__(self, signature: StageSignature, params_RP: torch.Tensor) -> None:
        self.signature = signature
        self.rules: dict[str, RuleSignature] = {rule.name: rule for rule in signature.rules}
        self._columns = dict(zip(signature.param_names, params_RP.split(1, 1), strict=False))
        self.attributes: Any = BoundAttributes({**self._columns, **dict(signature.switches)})
        self.min_keep_R1 = self._columns.get("min_keep")  #: the minimum number of tokens to keep; None: one
        self._cache: dict[str, Any] = {}

    def apply(self, rule: str, *arguments: Any) -> Any:
        """Call a rule."""
        return getattr(self.signature.kind, rule)(self.attributes, *arguments)

    def stats(self, tokens: RankedTokens, rule: str) -> RowStats:
        """The row statistics that a rule reads."""
        return tokens.stats(self.rules[rule].row, self.signature.kind.sorted_count)

    def at_least(self, last_R1: torch.Tensor) -> torch.Tensor:
        """The last positions to keep, raised so that the minimum number of tokens is kept."""
        return last_R1 if self.min_keep_R1 is None else torch.maximum(last_R1, self.min_keep_R1 - 1.0)

    def cached(self, rule: str, make: Callable[[], Any]) -> Any:
        """``make()``, computed once if it depends only on parameters that do not change."""
        if self.signature.state_names or self.rules[rule].row - {"top"}:
            return make()
        if rule not in self._cache:
            self._cache[rule] = make()
        return self._cache[rule]

    def updated_params(self, drawn: Any) -> torch.Tensor:
        """The parameters for the next step: [R, P]."""
        return torch.cat([*{**self._columns, **self.apply("update", drawn)}.values()], 1)


def bind_stages(signatures: Sequence[StageSignature], params_RP: torch.Tensor) -> list[BoundStage]:
    """Bind stages to their parameters, [R, P]; further columns are ignored."""
    columns = params_of_stages(signatures, params_RP)[:-1]
    return [BoundStage(signature, stage_RP) for signature, stage_RP in zip(signatures, columns, strict=True)]


def params_of_stages(signatures: Sequence[StageSignature], params_RP: torch.Tensor) -> list[torch.Tensor]:
    """The parameters of each stage, and further columns."""
    widths = [len(signature.param_names) for signature in signatures]
    return [*params_RP.split([*widths, params_RP.shape[1] - sum(widths)], 1)]


def apply_filter(tokens: RankedTokens, stage: BoundStage, uniform_R1: Any, exempt_RK: Any) -> RankedTokens:
    """The tokens after a stage. uniform_R1, exempt_RK: random number and exempt ids, for a Ceiling."""
    tokens, signature = tokens.resorted(), stage.signature
    if signature.greedy:
        return tokens.with_cut(last=tokens.constants.zero_R1)
    if signature.shape == "Scale":
        return _apply_scale(tokens.apply_cuts(), stage)
    if signature.shape == "Floor":
        return _apply_floor(tokens, stage)
    if signature.shape == "Prefix":
        return _apply_prefix(tokens, stage)
    return _apply_ceiling(tokens.apply_cuts(), stage, uniform_R1, exempt_RK)


def _apply_scale(tokens: RankedTokens, stage: BoundStage) -> RankedTokens:
    rule = stage.rules["apply"]
    y_RN = stage.apply("apply", tokens.below_RN, stage.stats(tokens, "apply"))
    if rule.is_linear:
        return RankedTokens(tokens.constants, tokens.ids_RN, y_RN, y_RN)
    x_RN = torch.where(tokens.surviving(), y_RN, tokens.constants.neg_inf)
    if not stage.signature.kind.monotone:  # type: ignore[attr-defined]  # equal scores are ranked by id
        return rank_tokens(tokens.constants, tokens.by_id(x_RN)[:, : x_RN.shape[1]])
    return RankedTokens(tokens.constants, tokens.ids_RN, x_RN, x_RN - x_RN.amax(1, keepdim=True))


def _apply_floor(tokens: RankedTokens, stage: BoundStage) -> RankedTokens:
    rule = stage.rules["floor"]
    if rule.row - {"top"}:
        tokens = tokens.apply_cuts()
    floor_R1 = stage.cached("floor", lambda: _column(tokens, stage.apply("floor", stage.stats(tokens, "floor"))))
    if stage.min_keep_R1 is not None:
        tokens = tokens.apply_cuts()
        return tokens.filtered((tokens.below_RN >= floor_R1) | (tokens.constants.position_N < stage.min_keep_R1))
    return tokens.with_cut(floor=floor_R1, floor_below_top=rule.below_top)


def _apply_prefix(tokens: RankedTokens, stage: BoundStage) -> RankedTokens:
    weight, constants = stage.rules["weight"], tokens.constants
    reorders, inclusive, ties = "order" in stage.rules, stage.signature.kind.inclusive, stage.signature.ties  # type: ignore[attr-defined]

    def target() -> torch.Tensor:
        return _column(tokens, stage.apply("target", stage.stats(tokens, "target")))

    if weight.is_one and not reorders:
        if stage.rules["target"].row - {"top"}:
            tokens = tokens.apply_cuts()
        rounded = torch.ceil if inclusive else torch.floor
        last_R1 = stage.cached("target", lambda: stage.at_least(rounded(target()).clamp(min=1.0) - 1.0))
        return _with_ties(tokens, constants.position_N <= last_R1) if ties else tokens.with_cut(last=last_R1)
    tokens = tokens.apply_cuts()
    if weight.is_softmax_weight and inclusive and not reorders and not ties:  # cumulative sums are sorted
        return tokens.with_cut(last=stage.at_least(torch.searchsorted(tokens.weight().cumsum(1), target())))
    below_RN, order_RN = tokens.below_RN, None
    if reorders:
        key_RN = stage.apply("order", below_RN, stage.stats(tokens, "order"))
        order_RN = torch.where(tokens.surviving(), key_RN, torch.inf).argsort(dim=1, stable=True)
        below_RN = below_RN.gather(1, order_RN)
    if weight.is_softmax_weight:
        weight_RN = below_RN.exp() if reorders else tokens.weight()
    else:
        weight_RN = torch.where(
            below_RN > -torch.inf, stage.apply("weight", below_RN, stage.stats(tokens, "weight")), 0.0
        )
    keep_RN = _until_target(constants, stage, weight_RN, target())
    if order_RN is not None:
        keep_RN = torch.zeros_like(keep_RN).scatter(1, order_RN, keep_RN)
    if ties:
        tokens = _with_ties(tokens, keep_RN)
        return tokens.filtered(tokens.surviving(), is_sorted=False) if reorders else tokens
    return tokens.filtered(keep_RN, is_sorted=not reorders)


def _until_target(constants: RowConstants, stage: BoundStage, weight_RN: Any, target_R1: Any) -> torch.Tensor:
    """The first tokens of an order, until their weights reach the target."""
    until_RN = weight_RN.cumsum(1)
    if stage.signature.kind.inclusive:  # type: ignore[attr-defined]
        keep_RN = torch.cat((constants.true_R1, (until_RN < target_R1)[:, :-1]), 1)
    else:
        keep_RN = (until_RN <= target_R1) | constants.first_N
    return keep_RN if stage.min_keep_R1 is None else keep_RN | (constants.position_N < stage.min_keep_R1)


def _with_ties(tokens: RankedTokens, keep_RN: torch.Tensor) -> RankedTokens:
    """Keep the tokens of a mask, and those with the same score as the last of them."""
    tokens = tokens.apply_cuts()
    least_R1 = torch.where(keep_RN & tokens.surviving(), tokens.x_RN, torch.inf).amin(1, keepdim=True)
    return tokens.filtered(keep_RN | (tokens.x_RN >= least_R1))


def _apply_ceiling(tokens: RankedTokens, stage: BoundStage, uniform_R1: Any, exempt_RK: Any) -> RankedTokens:
    threshold_R1 = _column(tokens, stage.apply("ceiling", stage.stats(tokens, "ceiling")))
    above_RN = tokens.below_RN >= threshold_R1.clamp(min=torch.finfo(tokens.constants.floats).min)
    dropped_R1 = torch.where(uniform_R1 < stage.attributes.act_probability, above_RN.sum(1, keepdim=True) - 1, 0)
    keep_RN = tokens.constants.position_N >= dropped_R1
    if exempt_RK is not None and exempt_RK.shape[1]:
        exempt_RP = torch.zeros_like(tokens.constants.neg_inf_RP, dtype=torch.bool)
        exempt_RP = torch.nn.functional.pad(exempt_RP, (0, 1)).scatter(1, exempt_RK, True)  # padding is >= V
        keep_RN = keep_RN | exempt_RP.gather(1, tokens.ids_RN)
    if stage.min_keep_R1 is not None:
        left_R1 = (keep_RN & tokens.surviving()).sum(1, keepdim=True)
        keep_RN = keep_RN | (left_R1 < stage.min_keep_R1)
    return tokens.filtered(keep_RN, is_sorted=False)


def _column(tokens: RankedTokens, value: Any) -> torch.Tensor:
    """The result of a rule as a tensor [R, 1]. It is a Python number if the rule reads no row."""
    column: torch.Tensor = value if isinstance(value, torch.Tensor) else tokens.constants.zero_1 + value
    return column.expand(len(tokens.constants.true_R1), 1) if column.dim() < 2 else column
