"""Logprobs in OpenAI's two formats: a list of tokens for chats, columns for completions; and in vLLM's for prompts.

Beyond OpenAI's fields, each logprob has ``token_id`` and ``rank``. Tokens are texts, or ``token_id:ID`` on request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nucleate.outputs import PromptLogprobs, StepLogprobs, TokenLogprob
from nucleate.server.openai.requests import ParsedRequest
from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""OpenAI's number for a logprob of -inf, which JSON cannot represent."""

JSON = dict[str, Any]


def step_body(step: StepLogprobs, tokenizer: Tokenizer, *, as_ids: bool = False) -> JSON:
    """Return the logprobs of one token in the chat format. as_ids: name tokens by their ids."""
    made = _token(step.chosen, tokenizer, as_ids=as_ids)
    made["top_logprobs"] = [_token(one, tokenizer, as_ids=as_ids) for one in step.top]
    if step.requested:
        made["requested_logprobs"] = [_token(one, tokenizer, as_ids=as_ids) for one in step.requested]
    return made


def prompt_body(request: ParsedRequest, logprobs: PromptLogprobs, tokenizer: Tokenizer) -> Iterator[JSON | None]:
    """Yield ``prompt_logprobs`` as vLLM does: for each token a map of token ids to logprobs."""
    top = request.params.prompt_logprobs or 0
    for step in logprobs:
        shown = () if step is None else (step.chosen, *step.top[:top], *step.requested)
        yield (
            None
            if step is None
            else {
                str(one.token_id): {
                    "logprob": max(one.logprob, MIN_LOGPROB),
                    "rank": one.rank,
                    "decoded_token": _bytes(one.token_id, tokenizer).decode(errors="replace"),
                }
                for one in shown
            }
        )


def columns(
    request: ParsedRequest,
    token_ids: Sequence[int],
    steps: Sequence[StepLogprobs | None],
    offsets: Iterable[int],
    tokenizer: Tokenizer,
) -> JSON:
    """Return the logprobs of tokens in the completions format: columns, with tokens as text.

    offsets: the character offset of each token.
    """
    top, as_ids = request.params.logprobs or 0, request.tokens_as_ids
    made: JSON = {
        "tokens": [_token_text(token, tokenizer, as_ids=as_ids) for token in token_ids],
        "token_logprobs": [None if step is None else max(step.chosen.logprob, MIN_LOGPROB) for step in steps],
        "top_logprobs": [
            None if step is None else _by_text((step.chosen, *step.top[:top]), tokenizer, as_ids=as_ids)
            for step in steps
        ],
        "text_offset": list(offsets),
    }
    if request.params.logprob_token_ids:
        made["requested_logprobs"] = [
            None if step is None else [_token(one, tokenizer, as_ids=as_ids) for one in step.requested]
            for step in steps
        ]
    return made


class TextOffsets:
    """Computes the character offsets of the tokens of a completion, one token at a time."""

    def __init__(self, request: ParsedRequest, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, request.params.skip_special_tokens)
        self._length = 0

    def push(self, token_id: int) -> int:
        """Return the number of final characters before this token. A stop string may still cut the text before it."""
        start = self._length
        self._length += len(self._detokenizer.push(token_id))
        return start


def _token(logprob: TokenLogprob, tokenizer: Tokenizer, *, as_ids: bool) -> JSON:
    data = _bytes(logprob.token_id, tokenizer)
    return {
        "token": f"token_id:{logprob.token_id}" if as_ids else data.decode(errors="replace"),
        "logprob": max(logprob.logprob, MIN_LOGPROB),
        "bytes": list(data),
        "token_id": logprob.token_id,
        "rank": logprob.rank,
    }


def _by_text(logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer, *, as_ids: bool) -> Mapping[str, float]:
    """Map token texts to logprobs; of tokens with the same text, the more likely one counts."""
    found: dict[str, float] = {}
    for one in sorted(logprobs, key=lambda one: -one.logprob):
        found.setdefault(_token_text(one.token_id, tokenizer, as_ids=as_ids), max(one.logprob, MIN_LOGPROB))
    return found


def _token_text(token_id: int, tokenizer: Tokenizer, *, as_ids: bool) -> str:
    """Return the text of a token, or its bytes in OpenAI's format if they are not valid UTF-8."""
    if as_ids:
        return f"token_id:{token_id}"
    data = _bytes(token_id, tokenizer)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _bytes(token_id: int, tokenizer: Tokenizer) -> bytes:
    """Return the bytes of a token; none for a padding id of the model."""
    pieces = tokenizer.pieces
    return pieces.as_bytes(token_id) if token_id in pieces.table else b""
