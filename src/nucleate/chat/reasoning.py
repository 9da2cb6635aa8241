"""Reasoning sections: the markers around them, by model family, and their limit.

``ReasoningTracker`` finds the section in the tokens of an output, and ends it after a number of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from nucleate.chat.reader import Emitter, Parsing, Reader
from nucleate.parameters.parameter import invalid_value
from nucleate.tokenization.tokenizer import Tokenizer

_SPACES: Final = " \t\n\r"


@dataclass(frozen=True)
class ReasoningFormat:
    """A section at the start of an output, between two markers.

    in_messages: the section is a message of harmony, and there may be several.
    """

    start: str
    end: str
    in_messages: bool = False

    @property
    def special_tokens(self) -> Sequence[str]:
        """The markers that may be special tokens."""
        return () if self.in_messages else (self.start, self.end)

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends within a section: the template has opened it."""
        return prompt.rstrip(_SPACES).endswith(self.start)

    def is_closed(self, prompt: str) -> bool:
        """Whether a prompt ends after a section: there is none in the output."""
        return prompt.rstrip(_SPACES).endswith(self.end)

    def parse(self, reader: Reader, out: Emitter, *, opened: bool) -> Parsing[None]:
        """Read the section, if the output has one."""
        if not opened:
            reader.record()
            yield from reader.spaces()
            found = yield from reader.literal(self.start)
            raw = reader.recorded()
            if found is None:
                if not reader.cut:  # then it is the beginning of the marker
                    out.content(raw)
                return
        out.marker()
        closed = yield from reader.until((self.end,), out.reasoning)
        if closed is None:
            out.close(reasoning=True)
        out.marker()

    def before(
        self, structure: dict[str, Any], *, opened: bool, spaced: bool, special: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return the format of an output with a section before another format (see ``ToolFormat.structure``).

        spaced: an empty line may be between them, which most models write. special: the markers that are special
        tokens, which no other text is.
        """
        begin, end = ({"type": "token", "token": one} if one in special else one for one in (self.start, self.end))
        section = {"type": "tag", "begin": "" if opened else begin, "content": {"type": "any_text"}, "end": end}
        if spaced and not self.in_messages:
            section = _sequence(section, {"type": "or", "elements": [_constant("\n\n"), _constant("")]})
        if self.in_messages:
            section = _sequence(section, _constant("<|start|>assistant"))
        return _sequence(section if opened else {"type": "optional", "content": section}, structure)


def _constant(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*elements]}


EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The values of ``reasoning_effort``."""


def effort_variables(effort: str) -> dict[str, Any]:
    """Return the variables of chat templates for a reasoning effort; "none" turns reasoning off where they can.

    Raises ParameterError for an unknown effort.
    """
    if effort not in EFFORTS:
        raise invalid_value("reasoning_effort", f"one of {', '.join(EFFORTS)}", effort)
    off = {"enable_thinking": False, "thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **off}


THINK: Final = ReasoningFormat("<think>", "</think>")
FORMATS: Final = {
    **dict.fromkeys(("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "holo2", "think"), THINK),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "openai_gptoss": ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>", in_messages=True),
}
"""By the names of vLLM's ``--reasoning-parser``."""
FORMATS["gpt_oss"] = FORMATS["openai_gptoss"]


DRAFT_ROOM: Final = 128
"""So many tokens before the limit, tokens are not drafted any more: drafts have no end marker."""
_SPACE_BYTES: Final = b" \t\n\r"


@dataclass(frozen=True)
class ReasoningSection:
    """The reasoning section of a chat. opened: the prompt has opened it. closing_ids: the tokens that close it."""

    format: ReasoningFormat
    opened: bool
    closing_ids: tuple[int, ...]


@final
class ReasoningTracker:
    """The section in one output. limit: its maximum number of tokens, without the markers; None: unlimited.

    After ``limit`` tokens, ``forced_token`` is the next token of the end marker, until it was pushed.
    """

    def __init__(self, section: ReasoningSection, tokenizer: Tokenizer, limit: int | None) -> None:
        self._pieces = tokenizer.pieces
        self._start, self._end = section.format.start.encode(), section.format.end.encode()
        self._repeats, self._closing_ids, self._limit = section.format.in_messages, section.closing_ids, limit
        self._forced: deque[int] = deque()
        self._tail = b""  # the end of the text, as long as the markers
        self.count = 0  #: tokens in the section so far
        self.closed = False  #: whether no section follows
        self._open = False
        if section.opened:
            self._open_section(b"")

    @property
    def forced_token(self) -> int | None:
        """The token that must be next, or None."""
        return self._forced[0] if self._forced else None

    @property
    def allows_draft(self) -> bool:
        """Whether several tokens may be sampled without a look at ``forced_token``."""
        return self.closed or self._limit is None or self._limit - self.count > DRAFT_ROOM

    def push(self, token: int) -> bool:
        """Add a token. Returns whether it is in the section."""
        if self.closed:
            return False
        if self._forced:
            self._forced.popleft()
            self.closed = not self._forced
            return False
        text = self._tail + (self._pieces.as_bytes(token) if token in self._pieces.table else b"")
        if not self._open:
            self._look_for_start(text)
            return False
        if self._end in text:
            self._open, self.closed, self._tail = False, not self._repeats, b""
            return False
        self._tail = text[-len(self._end) :]
        self.count += 1
        self._check_limit()
        return True

    def _look_for_start(self, text: bytes) -> None:
        if self._repeats:
            before, found, rest = text.partition(self._start)
            self._tail = text[-len(self._start) :]
        else:
            text = text.lstrip(_SPACE_BYTES)
            before, found, rest = text.partition(self._start)
            self._tail = text
            self.closed = bool(before) if found else not self._start.startswith(text)
        if found and not self.closed:
            self._open_section(rest)

    def _open_section(self, text: bytes) -> None:
        self._open, self._tail = True, text
        self._check_limit()

    def _check_limit(self) -> None:
        if self._limit is not None and self.count >= self._limit:
            self._forced.extend(self._closing_ids)
