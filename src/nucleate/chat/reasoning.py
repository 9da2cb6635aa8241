"""Reasoning sections: the markers around them, by model family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from nucleate.chat.emitter import Emitter
from nucleate.chat.reader import Parsing, Reader

_SPACES: Final = " \t\n\r"


@dataclass(frozen=True)
class ReasoningFormat:
    """A section at the start of an output, between two markers.

    in_messages: the section is a message of harmony, and there may be several. prompt_end: what the prompt ends with if
    it opens the section, if not with ``start``.
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
                out.content(raw)
                return
        out.marker()
        closed = yield from reader.until((self.end,), out.reasoning)
        if closed is None:
            out.close(reasoning=True)
        out.marker()

    def before(self, structure: dict[str, Any], *, opened: bool) -> dict[str, Any]:
        """Return the format of an output with a section before another format (see ``ToolFormat.structure``)."""
        if opened:
            return _sequence(self._section(""), structure)
        return {"type": "or", "elements": [_sequence(self._section(self.start), structure), structure]}

    def _section(self, begin: str) -> dict[str, Any]:
        return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": self.end}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*elements]}


THINK: Final = ReasoningFormat("<think>", "</think>")
FORMATS: Final = {
    **dict.fromkeys(("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "holo2", "think"), THINK),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "openai_gptoss": ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>", in_messages=True),
}
"""By the names of vLLM's ``--reasoning-parser``."""
FORMATS["gpt_oss"] = FORMATS["openai_gptoss"]
