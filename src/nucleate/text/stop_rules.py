"""What ends a sequence, as a checked value. Says nothing about how it is found: see ``stop``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from nucleate.core.parameter import ParameterError

MAX_STRINGS: Final = 4096
MAX_STRING_CHARACTERS: Final = 65_536  # of all stop strings together
MAX_TOKEN_IDS: Final = 65_536
MAX_PATTERNS: Final = 16
MAX_PATTERN_CHARACTERS: Final = 1024  # of one pattern
MAX_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class StopRules:
    """What ends a sequence; ``stop`` has the meaning of each. Lists are taken as well as tuples and sets.

    ``regex_seconds`` is the time that all patterns together may take, see ``stop``. Raises ParameterError that names
    the field, its value and what is allowed.
    """

    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    stop_regex: tuple[str, ...] = ()
    stop_json: bool = False
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    regex_seconds: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "stop_regex", _strings("stop_regex", self.stop_regex))
        for name in ("stop_token_ids", "eos_token_ids"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        for name in ("stop_json", "include_stop_str_in_output", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, getattr(self, name), "must be True or False")
        self._check_strings()
        self._check_patterns()
        self._check_numbers()

    def _check_strings(self) -> None:
        if len(self.stop) > MAX_STRINGS:
            raise _refusal("stop", f"{len(self.stop)} strings", f"at most {MAX_STRINGS} are allowed")
        if (total := sum(map(len, self.stop))) > MAX_STRING_CHARACTERS:
            raise _refusal("stop", f"{total} characters", f"at most {MAX_STRING_CHARACTERS} in all are allowed")

    def _check_patterns(self) -> None:
        if not self.stop_regex:
            return
        from nucleate.text.stop_regex import MAX_UNROLLED, compiled, unrolled

        if len(self.stop_regex) > MAX_PATTERNS:
            raise _refusal("stop_regex", f"{len(self.stop_regex)} patterns", f"at most {MAX_PATTERNS} are allowed")
        for pattern in self.stop_regex:
            if len(pattern) > MAX_PATTERN_CHARACTERS:
                reason = f"a pattern may have at most {MAX_PATTERN_CHARACTERS} characters, not {len(pattern)}"
                raise _refusal("stop_regex", pattern, reason)
        if sum(map(unrolled, self.stop_regex)) > MAX_UNROLLED:
            raise _refusal("stop_regex", self.stop_regex, "the repetitions {n} in it are too many")
        for pattern in self.stop_regex:
            try:
                matches_nothing = compiled(pattern).match("", timeout=0.1) is not None
            except ValueError as error:
                raise _refusal("stop_regex", pattern, f"not a pattern: {error}") from None
            except TimeoutError:
                raise _refusal("stop_regex", pattern, "takes too long on the empty string") from None
            if matches_nothing:
                raise _refusal("stop_regex", pattern, "must not match the empty string")

    def _check_numbers(self) -> None:
        if not _is_count(self.min_tokens):
            raise _refusal("min_tokens", self.min_tokens, "must be an integer, 0 or more")
        if self.max_tokens is not None:
            if not _is_count(self.max_tokens):
                raise _refusal("max_tokens", self.max_tokens, "must be None or an integer, 0 or more")
            if self.min_tokens > self.max_tokens:
                raise _refusal("min_tokens", self.min_tokens, f"must not exceed max_tokens, {self.max_tokens}")
        seconds = self.regex_seconds
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and math.isfinite(seconds)
        if not number or not 0 < seconds <= MAX_SECONDS:
            raise _refusal("regex_seconds", seconds, f"must be above 0 and at most {MAX_SECONDS}")


def _refusal(field: str, value: object, reason: str) -> ParameterError:
    return ParameterError(field, f"{field}={value!r:.100}: {reason}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _strings(field: str, value: object) -> tuple[str, ...]:
    # A bare string would be taken apart into its characters.
    if not isinstance(value, (tuple, list)):
        raise _refusal(field, value, "must be a tuple of strings")
    for index, string in enumerate(value):
        if not isinstance(string, str) or not string:
            raise _refusal(f"{field}[{index}]", string, "must be a non-empty string")
    return tuple(value)


def _token_ids(field: str, value: object) -> frozenset[int]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise _refusal(field, value, "must be a set of token ids")
    ids = list(value)
    if len(ids) > MAX_TOKEN_IDS:
        raise _refusal(field, f"{len(ids)} ids", f"at most {MAX_TOKEN_IDS} are allowed")
    for token_id in ids:
        if not _is_count(token_id):
            raise _refusal(field, token_id, "a token id is an integer, 0 or more")
    return frozenset(ids)
