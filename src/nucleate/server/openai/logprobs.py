"""Logprobs as OpenAI's two interfaces tell them: a list of tokens in chats, columns in completions. Knows no choices.

Beyond OpenAI's fields a logprob has its token id and its rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nucleate.outputs import PromptLogprobs, StepLogprobs, TokenLogprob
from nucleate.server.openai.requests import ParsedRequest
from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.tokenizer import Tokenizer

UNLIKELY = -9999.0
"""OpenAI's number for what JSON cannot write: the logprob of a token that was not in."""

JSON = dict[str, Any]


def step_body(step: StepLogprobs, tokenizer: Tokenizer, top: int | None = None) -> JSON:
    """The logprobs of one token as a chat tells them. top: how many of the likeliest; None: all there are."""
    made = _token(step.chosen, tokenizer)
    made["top_logprobs"] = [_token(one, tokenizer) for one in step.top[:top]]
    if step.asked:
        made["asked_logprobs"] = [_token(one, tokenizer) for one in step.asked]
    return made


def prompt_body(told: PromptLogprobs, top: int, tokenizer: Tokenizer) -> list[JSON | None]:
    """The logprobs of a prompt where they are asked for by themselves, as a chat would tell them."""
    return [None if step is None else step_body(step, tokenizer, top) for step in told]


def columns(
    asked: ParsedRequest,
    token_ids: Sequence[int],
    steps: Sequence[StepLogprobs | None],
    offsets: Iterable[int],
    tokenizer: Tokenizer,
) -> JSON:
    """The logprobs of some tokens as completions tell them: in columns, and tokens by their text.

    offsets: the place in the text where each token begins, in characters.
    """
    top = asked.params.logprobs or 0
    made: JSON = {
        "tokens": [_name(token, tokenizer) for token in token_ids],
        "token_logprobs": [None if step is None else max(step.chosen.logprob, UNLIKELY) for step in steps],
        "top_logprobs": [
            None if step is None else _by_name((step.chosen, *step.top[:top]), tokenizer) for step in steps
        ],
        "text_offset": list(offsets),
    }
    if asked.params.logprob_token_ids:
        made["asked_logprobs"] = [
            None if step is None else [_token(one, tokenizer) for one in step.asked] for step in steps
        ]
    return made


class Offsets:
    """Where the tokens of an answer begin: a push machine from its token ids to characters of its text before each."""

    def __init__(self, asked: ParsedRequest, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, asked.params.skip_special_tokens)
        self._length = 0

    def push(self, token_id: int) -> int:
        """Characters that are certain before this token. What ends an answer may cut its text before them."""
        start = self._length
        self._length += sum(map(len, self._detokenizer.push(token_id)))
        return start


def _token(told: TokenLogprob, tokenizer: Tokenizer) -> JSON:
    data = _bytes(told.token_id, tokenizer)
    return {
        "token": data.decode(errors="replace"),
        "logprob": max(told.logprob, UNLIKELY),
        "bytes": list(data),
        "token_id": told.token_id,
        "rank": told.rank,
    }


def _by_name(told: Sequence[TokenLogprob], tokenizer: Tokenizer) -> Mapping[str, float]:
    """Of two tokens with the same text the likelier one."""
    found: dict[str, float] = {}
    for one in sorted(told, key=lambda one: -one.logprob):
        found.setdefault(_name(one.token_id, tokenizer), max(one.logprob, UNLIKELY))
    return found


def _name(token_id: int, tokenizer: Tokenizer) -> str:
    """The text of a token; of one that is no text by itself its bytes, as OpenAI writes them."""
    data = _bytes(token_id, tokenizer)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _bytes(token_id: int, tokenizer: Tokenizer) -> bytes:
    """What a token adds to a text; nothing if it is one of the model's that stands for no token."""
    pieces = tokenizer.pieces
    return pieces.as_bytes(token_id) if token_id in pieces.table else b""
