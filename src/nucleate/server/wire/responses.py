"""Values to the bodies of answers, as OpenAI's API has them. Knows no requests and no I/O.

Beyond OpenAI's fields a choice has the seed, the token ids and the stop reason, and a logprob its token id and rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nucleate.core.event import Completion, Output, PromptLogprobs, StepLogprobs, TokenLogprob, Usage
from nucleate.core.parameter import ParameterError
from nucleate.text.detokenize import Detokenizer
from nucleate.text.tokenizer import Tokenizer

UNLIKELY = -9999.0
"""OpenAI's number for what JSON cannot write: the logprob of a token that was not in."""

JSON = dict[str, Any]


class Head(NamedTuple):
    """What an answer says of itself. created: seconds since 1970."""

    id: str
    created: int
    model: str


def completion_body(
    head: Head, completions: Sequence[Completion], tokenizer: Tokenizer, *, skip_special_tokens: bool = True
) -> JSON:
    """The answers to the prompts of one request, in order. skip_special_tokens: as the request had it."""
    choices: list[JSON] = []
    for completion in completions:
        for output in completion.outputs:
            logprobs = _legacy_logprobs(completion, output, tokenizer, skip_special_tokens)
            choices.append({"index": len(choices), "text": output.text, **_choice(output, logprobs)})
            choices[-1] |= _of_prompt(completion, output, tokenizer)
    usage = Usage(
        sum(completion.usage.prompt_tokens for completion in completions),
        sum(completion.usage.completion_tokens for completion in completions),
    )
    return _body(head, "text_completion", choices, usage)


def chat_body(head: Head, completion: Completion, tokenizer: Tokenizer) -> JSON:
    """The answers to a conversation."""
    choices = []
    for output in completion.outputs:
        content = None if output.logprobs is None else [_step(step, tokenizer) for step in output.logprobs]
        logprobs = None if content is None else {"content": content, "refusal": None}
        message = {"role": "assistant", "content": output.text, "refusal": None}
        choices.append({"index": output.index, "message": message, **_choice(output, logprobs)})
        choices[-1] |= _of_prompt(completion, output, tokenizer)
    return _body(head, "chat.completion", choices, completion.usage)


def error_body(
    message: str, param: str | None = None, code: str | None = None, kind: str = "invalid_request_error"
) -> JSON:
    """OpenAI's error object. param: the field at fault."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal_body(error: ParameterError) -> JSON:
    """The error object for a field that was not as it must be."""
    return error_body(str(error), error.field)


def usage_body(usage: Usage) -> JSON:
    """Tokens read and written."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def _body(head: Head, kind: str, choices: list[JSON], usage: Usage) -> JSON:
    named = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
    return {**named, "choices": choices, "usage": usage_body(usage)}


def _choice(output: Output, logprobs: JSON | None) -> JSON:
    return {
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "seed": output.seed,
        "token_ids": list(output.token_ids),
    }


def _of_prompt(completion: Completion, output: Output, tokenizer: Tokenizer) -> JSON:
    """The logprobs of the prompt, where they were asked for: with its first answer."""
    told: PromptLogprobs | None = completion.prompt_logprobs
    if told is None or output is not completion.outputs[0]:
        return {}
    return {"prompt_logprobs": [None if step is None else _step(step, tokenizer) for step in told]}


def _step(step: StepLogprobs, tokenizer: Tokenizer) -> JSON:
    """The logprobs of one token as a chat tells them."""
    made = _token(step.chosen, tokenizer)
    made["top_logprobs"] = [_token(one, tokenizer) for one in step.top]
    if step.asked:
        made["asked_logprobs"] = [_token(one, tokenizer) for one in step.asked]
    return made


def _token(told: TokenLogprob, tokenizer: Tokenizer) -> JSON:
    data = _bytes(told.token_id, tokenizer)
    return {
        "token": data.decode(errors="replace"),
        "logprob": max(told.logprob, UNLIKELY),
        "bytes": list(data),
        "token_id": told.token_id,
        "rank": told.rank,
    }


def _legacy_logprobs(
    completion: Completion, output: Output, tokenizer: Tokenizer, skip_special_tokens: bool
) -> JSON | None:
    """The logprobs of an answer as /v1/completions tells them: in columns, and tokens by their text."""
    steps = output.logprobs
    if steps is None:
        return None
    made: JSON = {
        "tokens": [_name(token, tokenizer) for token in output.token_ids],
        "token_logprobs": [max(step.chosen.logprob, UNLIKELY) for step in steps],
        "top_logprobs": [_by_name((step.chosen, *step.top), tokenizer) for step in steps],
        "text_offset": list(_offsets(completion, output, tokenizer, skip_special_tokens)),
    }
    if any(step.asked for step in steps):
        made["asked_logprobs"] = [[_token(one, tokenizer) for one in step.asked] for step in steps]
    return made


def _by_name(told: Sequence[TokenLogprob], tokenizer: Tokenizer) -> Mapping[str, float]:
    """Of two tokens with the same text the likelier one."""
    found: dict[str, float] = {}
    for one in sorted(told, key=lambda one: -one.logprob):
        found.setdefault(_name(one.token_id, tokenizer), max(one.logprob, UNLIKELY))
    return found


def _offsets(completion: Completion, output: Output, tokenizer: Tokenizer, skip_special_tokens: bool) -> Iterator[int]:
    """How many characters of the answer are there before each of its tokens."""
    detokenizer = Detokenizer(tokenizer, completion.prompt_token_ids, skip_special_tokens)
    length = 0
    for token in output.token_ids:
        yield min(length, len(output.text))
        length += sum(map(len, detokenizer.push(token)))


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
