"""Values to the bodies of answers, as OpenAI's API has them. Knows no I/O and no streams.

Beyond OpenAI's fields a choice has the seed, the token ids, the stop reason, and what an answer is worth whose schema
was not held in full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from nucleate.outputs import Completion, CompletionChunk, CompletionOutput, Usage, Validation
from nucleate.server.openai.echo import Echo
from nucleate.server.openai.logprobs import JSON, Offsets, columns, prompt_body, step_body
from nucleate.server.openai.requests import ParsedRequest
from nucleate.tokenization.tokenizer import Tokenizer

MOST_CHARACTERS, MOST_OF_A_NAME = 2000, 100
"""Of the message of an error, and of the field that it names: a client's own words may be in both."""
MOST_LISTED = 100
"""Of what is wrong with a schema or a text."""

_FAILED = "the model failed"
_Answer = TypeVar("_Answer", CompletionOutput, CompletionChunk)


class ResponseHead(NamedTuple):
    """What an answer says of itself. created: seconds since 1970."""

    id: str
    created: int
    model: str


def completion_body(
    head: ResponseHead, asked: ParsedRequest, completions: Sequence[Completion], tokenizer: Tokenizer
) -> JSON:
    """The answers to the prompts of one request, in order."""
    choices: list[JSON] = []
    told = [chosen(asked, completion) for completion in completions]
    for place, completion in enumerate(told):
        echo = Echo(asked, place, completion.prompt_token_ids, tokenizer)
        for output in completion.outputs:
            logprobs = _columns(asked, echo, completion, output, tokenizer) if asked.tells_logprobs else None
            choices.append({"index": len(choices), "text": echo.text + output.text, **_choice(output, logprobs)})
            choices[-1] |= _of_prompt(asked, completion, output, tokenizer)
    prompt_tokens = sum(completion.usage.prompt_tokens for completion in told)
    usage = Usage(prompt_tokens, sum(completion.usage.completion_tokens for completion in told))
    return _body(head, "text_completion", choices, usage)


def chat_body(head: ResponseHead, asked: ParsedRequest, completion: Completion, tokenizer: Tokenizer) -> JSON:
    """The answers to a conversation."""
    completion = chosen(asked, completion)
    choices = []
    for output in completion.outputs:
        content = [step_body(step, tokenizer) for step in output.logprobs or ()]
        logprobs = {"content": content, "refusal": None} if asked.tells_logprobs else None
        message = {"role": "assistant", "content": output.text, "refusal": None}
        choices.append({"index": output.index, "message": message, **_choice(output, logprobs)})
        choices[-1] |= _of_prompt(asked, completion, output, tokenizer)
    return _body(head, "chat.completion", choices, completion.usage)


def chosen(asked: ParsedRequest, completion: Completion) -> Completion:
    """What is told of the answers made: the n best of best_of, those with the highest mean logprob of their tokens.

    They are numbered anew, best first. The usage counts all tokens that were made; where ``max_tokens`` was 0, none.
    """
    outputs, usage = completion.outputs, completion.usage
    if len(outputs) > asked.params.n:
        best = sorted(outputs, key=_mean_logprob, reverse=True)[: asked.params.n]  # of equals the first
        outputs = tuple(replace(output, index=index) for index, output in enumerate(best))
    if not asked.tells_logprobs:
        outputs = tuple(output if output.logprobs is None else replace(output, logprobs=None) for output in outputs)
    if asked.silent:
        outputs, usage = tuple(map(unsaid, outputs)), Usage(usage.prompt_tokens, 0)
    return replace(completion, outputs=outputs, usage=usage)


def unsaid(answer: _Answer) -> _Answer:
    """An answer, or a piece of one, without what it says: as if it had reached a length of 0."""
    told = None if answer.logprobs is None else ()
    if answer.finish_reason in ("stop", "length"):
        answer = replace(answer, finish_reason="length", stop_reason=None)
    return replace(answer, text="", token_ids=(), logprobs=told, validation=None)


def failure_message(stop_reason: str | int | None) -> str:
    """What a client is told of an error: what the model itself said may hold paths, and is kept from it."""
    text = str(stop_reason)
    return _FAILED if text.startswith(_FAILED) else text


def error_body(
    message: str, param: str | None = None, code: str | None = None, kind: str = "invalid_request_error"
) -> JSON:
    """OpenAI's error object. param: the field at fault. Both are cut, and can be written as UTF-8."""
    named = None if param is None else _cut(param, MOST_OF_A_NAME)
    return {"error": {"message": _cut(message, MOST_CHARACTERS), "type": kind, "param": named, "code": code}}


def validation_body(validation: Validation | None) -> JSON:
    """What a choice has of it: nothing, if its schema was held in full, or there was none."""
    if validation is None:
        return {}
    return {"validation": {name: _first(told) for name, told in validation._asdict().items()}}


def _first(texts: Sequence[str]) -> list[str]:
    more = [f"and {len(texts) - MOST_LISTED} more"] if len(texts) > MOST_LISTED else []
    return [*(_cut(text, MOST_CHARACTERS) for text in texts[:MOST_LISTED]), *more]


def usage_body(usage: Usage) -> JSON:
    """Tokens read and written."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def _body(head: ResponseHead, kind: str, choices: list[JSON], usage: Usage) -> JSON:
    named = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
    return {**named, "choices": choices, "usage": usage_body(usage)}


def _choice(output: CompletionOutput, logprobs: JSON | None) -> JSON:
    return {
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "seed": output.seed,
        "token_ids": list(output.token_ids),
        **validation_body(output.validation),
    }


def _of_prompt(asked: ParsedRequest, completion: Completion, output: CompletionOutput, tokenizer: Tokenizer) -> JSON:
    """The logprobs of the prompt, where they were asked for: with its first answer."""
    told, top = completion.prompt_logprobs, asked.params.prompt_logprobs
    if told is None or top is None or output is not completion.outputs[0]:
        return {}
    return {"prompt_logprobs": prompt_body(told, top, tokenizer)}


def _columns(
    asked: ParsedRequest, echo: Echo, completion: Completion, output: CompletionOutput, tokenizer: Tokenizer
) -> JSON:
    offsets, most = Offsets(asked, completion.prompt_token_ids, tokenizer), len(output.text)
    places = [len(echo.text) + min(offsets.push(token), most) for token in output.token_ids]
    own = columns(asked, output.token_ids, output.logprobs or (), places, tokenizer)
    return echo.before(own, completion.prompt_logprobs)


def _mean_logprob(output: CompletionOutput) -> float:
    total = output.cumulative_logprob
    return -math.inf if total is None else total / len(output.token_ids)


def _cut(text: str, most: int) -> str:
    text = text if len(text) <= most else text[: most - 3] + "..."
    return text.encode(errors="replace").decode()  # half a character, as JSON can say it, has no UTF-8
