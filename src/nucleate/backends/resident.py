"""What a device keeps of a row whose pipeline runs there: numbers and lists. Knows no stage, and no torch.

A Shift that is none of these is run over the entries of a row by its own rule, after those before it (``Ordered``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nucleate.backends.rules import LARGEST, reads
from nucleate.backends.structure import Staged, odd_name
from nucleate.core.stage import Shift

COUNTS = {"prompt_count", "output_count"}

EVERYTHING = -1
"""All that was said, however long ago."""

Words = tuple[tuple[int, ...], ...]
"""Sequences of token ids."""


class Penalties(NamedTuple):
    """Of tokens that occurred; the defaults do nothing."""

    scale: float = 1.0  #: divides scores above 0, multiplies others
    each: float = 0.0  #: subtracted for each time in the output
    once: float = 0.0  #: subtracted if in the output
    window: int | None = None  #: see ``Shift.window``
    counts: bool = False  #: whether there are any


class Repeats(NamedTuple):
    """A penalty of what goes on a repeat of n tokens: factor * base ** (n - allowed), subtracted."""

    factor: float
    base: float
    most: float  #: the largest penalty,
    room: int  #: of all exponents from this on
    allowed: int  #: the shortest repeat that counts, at least 1
    last: int  #: looks at so many of the last tokens; -1: all
    breakers: Words  #: no repeat goes across these


class Ordered(NamedTuple):
    """Its numbers and its list are a row's; the rest is what rows of a structure share."""

    kind: type[Shift]
    touches: str  #: "seen", "output" or "listed"
    window: int | None
    counts: bool  #: whether it reads how often tokens occurred
    repeats: bool  #: whether its list is what the row's repeats say
    switches: tuple[tuple[str, Any], ...]  #: attributes that are true, false or none
    names: tuple[str, ...]  #: of its numbers
    numbers: tuple[float, ...] = ()
    listing: Mapping[int, float] = {}

    @property
    def structure(self) -> Ordered:
        return self._replace(numbers=(), listing={})


class Resident(NamedTuple):
    """A row's pipeline, as far as the logits are concerned; what is told of them comes from elsewhere."""

    numbers: Sequence[float]  #: see ``chain.Numbers``
    penalties: Penalties = Penalties()
    before: Mapping[int, float] = {}  #: added before the penalties; -inf is a ban
    until: Mapping[int, int] = {}  #: bans that end when the output has so many tokens
    allowed: frozenset[int] | None = None  #: the only ones, if not None
    wanted: tuple[int, tuple[int, ...]] | None = None  #: see ``Tap.wanted``; None: no logprobs
    late: Mapping[int, float] = {}  #: added after the penalties
    repeats: Repeats | None = None  #: after the penalties too
    ngram: int = 0  #: no so many tokens in a row are said twice; 0: they may be
    words: Words = ()  #: sequences of two or more tokens that the output does not have
    ordered: tuple[Ordered, ...] = ()  #: what changes scores one after the other; then the repeats are among these
    staged: Staged | None = None  #: the stages after all this, where the numbers do not say them

    @property
    def edits(self) -> bool:
        """Whether scores of single tokens change."""
        return bool(self.penalties.counts or self.before or self.until or self.late or self.looks or self.ordered)

    @property
    def looks(self) -> bool:
        """Whether what changes depends on the order of what was said."""
        return bool(self.follows or self.words)

    @property
    def follows(self) -> bool:
        """Whether it depends on which earlier tokens the last ones repeat."""
        return self.repeats is not None or self.ngram > 0

    @property
    def grows(self) -> bool:
        """Whether a token that is said changes its own score from then on, or may."""
        return self.penalties.counts or self.follows or any(one.counts for one in self.ordered)

    @property
    def fixed(self) -> bool:
        """Whether the same is done to the scores in each step."""
        return not (self.grows or self.looks or self.until or self.ordered)

    @property
    def span(self) -> int:
        """How many of the last tokens a step may look at, at most, beside those of words; or EVERYTHING."""
        windows = [self.penalties.window or 0] if self.penalties.counts else [0]  # what came before is counted
        windows += [one.window if one.window is not None else EVERYTHING for one in self.ordered if one.counts]
        windows += [] if self.repeats is None else [self.repeats.last]
        if self.ngram or any(window < 0 for window in windows[1:]):
            return EVERYTHING
        return max(windows)

    @property
    def longest(self) -> int:
        """Of the sequences that are looked for."""
        breakers = () if self.repeats is None else self.repeats.breakers
        return max((len(word) for word in (*self.words, *breakers)), default=0)


def ordered_of(shift: Shift, listing: Mapping[int, float], *, repeats: bool = False) -> Ordered | str:
    """What a device is to run of a Shift; or why it cannot. repeats: its list is worked out from what was said."""
    kind, asked = type(shift), reads(shift, "apply")
    why = odd_name(kind.apply)
    if why or asked.mine is None:
        return f"{kind.__name__}.apply {why or 'is not one expression of numbers'}"
    values = {name: getattr(shift, name) for name in asked.mine}
    switches = {name: value for name, value in values.items() if isinstance(value, bool | None)}
    numbers = {name: value for name, value in values.items() if name not in switches}
    if any(isinstance(one, int) and abs(one) > LARGEST for one in numbers.values()):
        return f"{shift!r} has an integer that is too large"
    counts = shift.touches != "listed" or bool(COUNTS & {*kind.apply.__code__.co_names})
    window = shift.window if shift.window is None else max(-1, min(shift.window, LARGEST))
    return Ordered(
        kind,
        shift.touches,
        window,
        counts,
        repeats,
        tuple(switches.items()),
        tuple(numbers),
        tuple(map(float, numbers.values())),
        listing,
    )
