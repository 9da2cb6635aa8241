"""When a sequence ends, and which of its text may be shown. A push machine; knows no tokenizer and no model.

Each push is one token: its id, and the text that became certain with it. After each, in this order:

1. *Stop tokens.* EOS (unless ``ignore_eos``) ends with detail None, one of ``stop_token_ids`` with the id. The token's
   own text is neither shown nor searched, unless ``include_stop_str_in_output``: then it is shown.
2. *Stop text.* The text is what a reader has before them: all text up to now. The sequence ends at the first token
   after which it contains a stop string, a match of a pattern, or a complete JSON value (see ``json_stop``). Of what
   the token completed, the match that starts earliest counts, of these the longest; of equals, strings go before
   patterns, and patterns in their order. Text is cut before the match, or after it with
   ``include_stop_str_in_output``. A JSON value counts at its end (ahead of a match that starts there), is always kept,
   and has detail "json".
3. *Length.* ``max_tokens`` tokens are out.

Until ``min_tokens`` tokens are out nothing of 1 and 2 counts: what completes before is passed over for good, what has
begun may complete later. Text is held only while it is the beginning of a possible match, and is shown by ``close``
however the sequence ends. Patterns may take ``regex_seconds`` for a sequence, and a hundredth of that comes back with
each token; once they have taken more, the sequence ends with reason "error". What is held then is not shown, because
nobody knows whether it matches.
"""

from __future__ import annotations

import time

from nucleate.outputs import Finish
from nucleate.stopping.stop_json import JsonSearch
from nucleate.stopping.stop_regex import RegexSearch
from nucleate.stopping.stop_rules import StopRules
from nucleate.stopping.stop_strings import StringMatch, StringSearch

__all__ = ["StopMatcher", "StopRules"]

_BACK = 0.01
"""The share of the seconds for patterns that comes back with each token."""


class StopMatcher:
    """The stop rules applied to one sequence.

    ``finish`` is None while the sequence runs. Call ``close`` once at the end, however it ended, and read ``finish``
    after it: text that the detokenizer held to the end may complete a stop, and then that is why the sequence ended.
    """

    def __init__(self, rules: StopRules) -> None:
        self.finish = Finish("length") if rules.max_tokens == 0 else None
        self._rules = rules
        self._tokens = 0
        self._strings = StringSearch(rules.stop) if rules.stop else None
        self._regexes = [RegexSearch(pattern) for pattern in rules.stop_regex]
        self._json = JsonSearch() if rules.stop_json else None
        self._searches = bool(rules.stop or rules.stop_regex or rules.stop_json)
        self._held = ""
        self._shown = 0  # characters
        self._seconds = rules.regex_seconds  # that patterns may take still
        self._over = False  # the text is cut, or closed: nothing follows

    def is_stop_token(self, token_id: int) -> bool:
        """Whether ``token_id`` as the next token ends the sequence; then its own text need not be made at all."""
        rules = self._rules
        if self._tokens + 1 < rules.min_tokens:
            return False
        return token_id in rules.stop_token_ids or (token_id in rules.eos_token_ids and not rules.ignore_eos)

    def push(self, token_id: int, text: str) -> tuple[str, ...]:
        """One more token, and the text that became certain with it (may be empty): the text that may be shown now.

        Raises RuntimeError after the sequence has ended.
        """
        if self.finish is not None or self._over:
            raise RuntimeError(f"token {token_id} was pushed after the sequence had ended: {self.finish}")
        rules = self._rules
        stops = self.is_stop_token(token_id)
        self._tokens += 1
        if stops:
            eos = token_id in rules.eos_token_ids and not rules.ignore_eos
            self.finish = Finish("stop", None if eos else token_id)
            return self._show_stop_token(text) if rules.include_stop_str_in_output else ()
        shown = self._read(text) if text else ()
        if self.finish is None and rules.max_tokens is not None and self._tokens >= rules.max_tokens:
            self.finish = Finish("length")
        return shown

    def complete(self) -> None:
        """Nothing can follow the last token: that is why the sequence ended, unless a stop was found with it."""
        if self.finish is None or self.finish.reason == "length":
            self.finish = Finish("stop")

    def close(self, tail: str = "") -> tuple[str, ...]:
        """The end: ``tail`` is the text the detokenizer held to the end. The text that is still to be shown."""
        if self._over:
            return ()
        shown = self._read(tail) if tail else ()
        if not self._over:
            self._over = True
            shown = (*shown, self._held) if self._held else shown
            self._held = ""
        text = "".join(shown)
        return (text,) if text else ()

    def _show_stop_token(self, text: str) -> tuple[str, ...]:
        if not text:
            return ()
        # The token's text stands between what came before and the tail: no match reaches across it.
        self._searches = False
        text, self._held = self._held + text, ""
        return (text,)

    def _read(self, text: str) -> tuple[str, ...]:
        if not self._searches:
            return (text,)
        self._held += text
        try:
            cut = self._search(text)
        except TimeoutError:
            self._over = True
            return ()
        if cut is not None:
            self._over = True
            text = self._held[: cut - self._shown]
            return (text,) if text else ()
        held = self._strings.open if self._strings is not None else 0
        for search in self._regexes:
            held = max(held, search.open)
        safe = len(self._held) - held
        text, self._held = self._held[:safe], self._held[safe:]
        self._shown += safe
        return (text,) if text else ()

    def _search(self, text: str) -> int | None:
        """Where the text is cut, in characters from its beginning, if a stop was completed by ``text``."""
        ignore = self._tokens < self._rules.min_tokens
        best = self._strings.push(text, ignore) if self._strings is not None else None
        if self._regexes:
            found = self._search_patterns(text, ignore)
            # min() keeps the first of equals: strings first, then the order of the patterns.
            found = [best, *found] if best is not None else found
            best = min(found, key=lambda match: (match.start, -match.end), default=None)
        end = self._json.push(text, ignore) if self._json is not None else None
        if end is not None and (best is None or end <= best.start):
            self.finish = Finish("stop", "json")
            return end
        if best is None:
            return None
        self.finish = Finish("stop", best.detail)
        return best.end if self._rules.include_stop_str_in_output else best.start

    def _search_patterns(self, text: str, ignore: bool) -> list[StringMatch]:
        """The match of each pattern that has one. Raises TimeoutError, with the finish set, if one takes too long."""
        limit, start = self._rules.regex_seconds, time.monotonic()
        deadline = start + self._seconds
        found = []
        for search in self._regexes:
            try:
                match = search.push(text, max(deadline - time.monotonic(), 1e-3), ignore)
            except TimeoutError:
                why = f"took longer than {limit:g} s, and {limit * _BACK:g} s per token"
                self.finish = Finish("error", f"stop_regex {search.pattern!r:.200} {why}")
                raise
            if match is not None:
                found.append(match)
        self._seconds = min(limit, deadline - time.monotonic() + limit * _BACK)
        return found
