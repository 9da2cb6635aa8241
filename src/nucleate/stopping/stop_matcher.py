"""Stop criteria: when a sequence ends, and which part of its text may be shown already.

``StopMatcher.push`` takes one token: its id, and the text that it completed. After each token, in this order:

1. *Stop tokens.* EOS (unless ``ignore_eos``) ends the sequence with detail None, one of ``stop_token_ids`` with the id,
   a special token that is a stop string with the string. The text of the stop token is not searched. It is shown only
   with ``include_stop_str_in_output``. The end of a turn in a chat (``turn_ends``) counts as EOS, also as text.
2. *Stop text.* The sequence ends at the first token after which its text contains a stop string, a match of a stop
   regex, or a complete JSON value (see ``stop_searches``). Of the matches that the token completed, the one that starts
   earliest counts, of these the longest; on a tie, strings precede regexes, and regexes have their order. The text is
   truncated before the match, or after it with ``include_stop_str_in_output``. A JSON value counts at its end (before
   a match that starts there), is always included, and has detail "json".
3. *Length.* There are ``max_tokens`` tokens.

Until there are ``min_tokens`` tokens, 1 and 2 do not apply: a match completed before is ignored, a match that has only
begun may complete later. Text is held back only while it is the beginning of a possible match; ``close`` releases it,
however the sequence ended. Regexes have a time budget of ``regex_seconds`` per sequence, of which each token restores a
hundredth. When it is exhausted, the sequence ends with reason "error", and the held text is discarded, because it may
match.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from nucleate.outputs import Finish
from nucleate.parameters.parameter import ParameterError
from nucleate.stopping.stop_searches import (
    MAX_UNROLLED,
    JsonSearch,
    RegexSearch,
    StringMatch,
    StringSearch,
    compiled,
    unrolled,
)

MAX_PATTERNS: Final = 16
MAX_PATTERN_CHARACTERS: Final = 1024  # of one pattern
RESTORED = 0.01
"""The share of the time budget for regexes that each token restores."""


@dataclass(frozen=True, kw_only=True)
class StopRules:
    """The stop criteria of a sequence, with the values of ``SamplingParams``.

    ``stop_special``: the stop strings that are special tokens, which have no text: their ids and the strings.
    ``turn_ends``: strings that end a sequence as EOS does; empty with ``ignore_eos``.
    ``regex_seconds`` is the time budget of all regexes. Raises ParameterError for an invalid regex, one that matches
    the empty string, and one that could take too much time or memory.
    """

    stop: tuple[str, ...] = ()
    stop_special: tuple[tuple[int, str], ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    turn_ends: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_json: bool = False
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    regex_seconds: float = 0.5

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end the sequence."""
        if not (self.stop_token_ids or self.stop_special or self.ignore_eos):
            return self.eos_token_ids
        own = self.stop_token_ids.union(token for token, _ in self.stop_special)
        return own if self.ignore_eos else own | self.eos_token_ids

    def __post_init__(self) -> None:
        if not self.stop_regex:
            return
        if len(self.stop_regex) > MAX_PATTERNS:
            raise _error(f"{len(self.stop_regex)} patterns", f"at most {MAX_PATTERNS} are allowed")
        for pattern in self.stop_regex:
            if len(pattern) > MAX_PATTERN_CHARACTERS:
                raise _error(pattern, f"at most {MAX_PATTERN_CHARACTERS} characters are allowed, got {len(pattern)}")
        if sum(map(unrolled, self.stop_regex)) > MAX_UNROLLED:
            raise _error(self.stop_regex, "too many repetitions")
        for pattern in self.stop_regex:
            try:
                matches_nothing = compiled(pattern).match("", timeout=0.1) is not None
            except ValueError as error:
                raise _error(pattern, f"invalid pattern: {error}") from None
            except TimeoutError:
                raise _error(pattern, "takes too long on the empty string") from None
            if matches_nothing:
                raise _error(pattern, "must not match the empty string")


def _error(value: object, reason: str) -> ParameterError:
    return ParameterError("stop_regex", f"stop_regex={value!r:.100}: {reason}")


class StopMatcher:
    """Applies the stop criteria to one sequence.

    ``finish`` is None while the sequence runs. Call ``close`` once at the end, however it ended, and read ``finish``
    after that: the text that the detokenizer held until the end may complete a match, which then is the finish reason.
    """

    __slots__ = (
        "_closed", "_end_ids", "_held", "_json", "_max_tokens", "_min_tokens", "_regexes", "_rules", "_searches",
        "_seconds", "_shown", "_strings", "_tokens", "finish",
    )  # fmt: skip

    def __init__(self, rules: StopRules) -> None:
        self.finish = Finish("length") if rules.max_tokens == 0 else None
        self._rules = rules
        self._end_ids, self._min_tokens = rules.end_ids, rules.min_tokens
        self._max_tokens = 1 << 62 if rules.max_tokens is None else rules.max_tokens
        self._tokens = 0
        strings = (*rules.stop, *rules.turn_ends)
        self._strings = StringSearch(strings) if strings else None
        self._regexes = [RegexSearch(pattern) for pattern in rules.stop_regex]
        self._json = JsonSearch() if rules.stop_json else None
        self._searches = bool(strings or rules.stop_regex or rules.stop_json)
        self._held = ""
        self._shown = 0  # characters
        self._seconds = rules.regex_seconds  # left of the time budget
        self._closed = False  # the text is truncated or closed

    def is_stop_token(self, token_id: int) -> bool:
        """Whether ``token_id`` as the next token ends the sequence; then it need not be detokenized."""
        return token_id in self._end_ids and self._tokens + 1 >= self._min_tokens

    def push(self, token_id: int, text: str) -> str:
        """Add a token and the text that it completed (may be empty). Returns the text that may be shown now.

        Raises RuntimeError after the sequence has ended.
        """
        if self.finish is not None or self._closed:
            raise RuntimeError(f"token {token_id} was pushed after the sequence had ended: {self.finish}")
        tokens = self._tokens = self._tokens + 1
        if token_id in self._end_ids and tokens >= self._min_tokens:
            rules = self._rules
            eos = token_id in rules.eos_token_ids and not rules.ignore_eos
            special = dict(rules.stop_special).get(token_id)
            self.finish = Finish("stop", None if eos else token_id if special is None else special)
            if special is not None and not text.endswith(special):
                text += special
            return self._show_stop_token(text) if rules.include_stop_str_in_output else ""
        if self._searches and text:
            text = self._read(text)
        if tokens >= self._max_tokens and self.finish is None:
            self.finish = Finish("length")
        return text

    def complete(self) -> None:
        """End the sequence because no token can follow (structured output), unless a stop match has ended it."""
        if self.finish is None or self.finish.reason == "length":
            self.finish = Finish("stop")

    def close(self, tail: str = "") -> str:
        """End the text. ``tail``: the text that the detokenizer held until the end. Returns the text not yet shown."""
        if self._closed:
            return ""
        shown = self._read(tail) if self._searches and tail else tail
        if not self._closed:
            self._closed = True
            shown, self._held = shown + self._held, ""
        return shown

    def _show_stop_token(self, text: str) -> str:
        if not text:
            return ""
        # No match may extend across the text of the stop token.
        self._searches = False
        text, self._held = self._held + text, ""
        return text

    def _read(self, text: str) -> str:
        self._held += text
        try:
            cut = self._search(text)
        except TimeoutError:
            self._closed = True
            return ""
        if cut is not None:
            self._closed = True
            return self._held[: cut - self._shown]
        held = self._strings.open if self._strings is not None else 0
        for search in self._regexes:
            held = max(held, search.open)
        safe = len(self._held) - held
        text, self._held = self._held[:safe], self._held[safe:]
        self._shown += safe
        return text

    def _search(self, text: str) -> int | None:
        """Where to truncate the text, in characters from its start, if ``text`` completes a match."""
        ignore = self._tokens < self._rules.min_tokens
        best = self._strings.push(text, ignore) if self._strings is not None else None
        if self._regexes:
            found = self._search_regexes(text, ignore)
            # min() keeps the first of equals: strings precede regexes.
            found = [best, *found] if best is not None else found
            best = min(found, key=lambda match: (match.start, -match.end), default=None)
        end = self._json.push(text, ignore) if self._json is not None else None
        if end is not None and (best is None or end <= best.start):
            self.finish = Finish("stop", "json")
            return end
        if best is None:
            return None
        is_turn_end = best.detail in self._rules.turn_ends and best.detail not in self._rules.stop
        self.finish = Finish("stop", None if is_turn_end else best.detail)
        return best.end if self._rules.include_stop_str_in_output else best.start

    def _search_regexes(self, text: str, ignore: bool) -> list[StringMatch]:
        """The matches of the regexes. Sets ``finish`` and raises TimeoutError if they take too long."""
        limit, start = self._rules.regex_seconds, time.monotonic()
        deadline = start + self._seconds
        found = []
        for search in self._regexes:
            try:
                match = search.push(text, max(deadline - time.monotonic(), 1e-3), ignore)
            except TimeoutError:
                message = f"took longer than {limit:g} s, and {limit * RESTORED:g} s per token"
                self.finish = Finish("error", f"stop_regex {search.pattern!r:.200} {message}")
                raise
            if match is not None:
                found.append(match)
        self._seconds = min(limit, deadline - time.monotonic() + limit * RESTORED)
        return found
