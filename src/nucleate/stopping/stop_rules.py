"""What ends a sequence, as a value. Says nothing about how it is found: see ``stop``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nucleate.parameters.parameter import ParameterError

MAX_PATTERNS: Final = 16
MAX_PATTERN_CHARACTERS: Final = 1024  # of one pattern


@dataclass(frozen=True, kw_only=True)
class StopRules:
    """What ends a sequence; ``stop`` has the meaning of each. The values are checked: those of ``SamplingParams``.

    ``regex_seconds`` is the time that all patterns together may take, see ``stop``. Raises ParameterError for a pattern
    that is none, that matches nothing, or that could be too much work.
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
        if not self.stop_regex:
            return
        from nucleate.stopping.stop_regex import MAX_UNROLLED, compiled, unrolled

        if len(self.stop_regex) > MAX_PATTERNS:
            raise _refusal(f"{len(self.stop_regex)} patterns", f"at most {MAX_PATTERNS} are allowed")
        for pattern in self.stop_regex:
            if len(pattern) > MAX_PATTERN_CHARACTERS:
                most = f"a pattern may have at most {MAX_PATTERN_CHARACTERS} characters"
                raise _refusal(pattern, f"{most}, not {len(pattern)}")
        if sum(map(unrolled, self.stop_regex)) > MAX_UNROLLED:
            raise _refusal(self.stop_regex, "the repetitions {n} in it are too many")
        for pattern in self.stop_regex:
            try:
                matches_nothing = compiled(pattern).match("", timeout=0.1) is not None
            except ValueError as error:
                raise _refusal(pattern, f"not a pattern: {error}") from None
            except TimeoutError:
                raise _refusal(pattern, "takes too long on the empty string") from None
            if matches_nothing:
                raise _refusal(pattern, "must not match the empty string")


def _refusal(value: object, reason: str) -> ParameterError:
    return ParameterError("stop_regex", f"stop_regex={value!r:.100}: {reason}")
