"""Reasoning sections: the markers around them, by model family."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nucleate.chat.emitter import Emitter
from nucleate.chat.reader import Parsing, Reader
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError

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
        message = f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {shown(effort)}"
        raise ParameterError("reasoning_effort", message)
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
