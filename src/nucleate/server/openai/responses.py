"""Builds response bodies in OpenAI's format.

Beyond OpenAI's fields, a choice has ``seed``, ``token_ids``, ``stop_reason``, and ``validation`` if keywords of its
schema were ignored. Logprobs have two formats: a list of tokens for chats, columns for completions; those of prompts
are vLLM's. Each has ``token_id`` and ``rank``. Tokens are texts, or ``token_id:ID`` on request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from nucleate.outputs import (
    Completion,
    CompletionChunk,
    CompletionOutput,
    PromptLogprobs,
    StepLogprobs,
    TokenLogprob,
    Usage,
    Validation,
)
from nucleate.server.openai.requests import ParsedRequest, Prompt
from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""OpenAI's number for a logprob of -inf, which JSON cannot represent."""

JSON = dict[str, Any]


Collect = Callable[[Iterable[Any]], Any]
"""What becomes of a long list: ``list``, or ``iter`` for a body that is encoded piece by piece."""


class TokenBodies:
    """Builds what the response to a request has of tokens: their texts, bytes and logprobs."""

    def __init__(self, request: ParsedRequest, tokenizer: Tokenizer) -> None:
        self.request, self.tokenizer = request, tokenizer

    def step(self, step: StepLogprobs) -> JSON:
        """Return the logprobs of one token in the chat format."""
        return {**self._token(step.chosen), "top_logprobs": [*map(self._token, _shown(step, step.top))]}

    def prompt(self, logprobs: PromptLogprobs | None, collect: Collect) -> JSON:
        """Return ``prompt_logprobs`` as vLLM does, if requested: for each token a map of token ids to logprobs."""
        top = self.request.params.prompt_logprobs
        if logprobs is None or top is None:
            return {"prompt_logprobs": None}
        shown = (() if step is None else (step.chosen, *step.top[:top], *step.requested) for step in logprobs)
        bodies = ({str(one.token_id): self._named(one) for one in own} or None for own in shown)
        return {"prompt_logprobs": collect(bodies)}

    def _named(self, one: TokenLogprob) -> JSON:
        text = self._bytes(one.token_id).decode(errors="replace")
        return {"logprob": max(one.logprob, MIN_LOGPROB), "rank": one.rank, "decoded_token": text}

    def columns(self, token_ids: Sequence[int], steps: Sequence[StepLogprobs | None], offsets: Iterable[int]) -> JSON:
        """Return the logprobs of tokens in the completions format: columns, with tokens as text.

        offsets: the character offset of each token.
        """
        params = self.request.params
        made: JSON = {
            "tokens": [*map(self._text, token_ids)],
            "token_logprobs": [None if step is None else max(step.chosen.logprob, MIN_LOGPROB) for step in steps],
            "top_logprobs": [
                None if step is None else self._by_text(step.chosen, _shown(step, step.top[: params.logprobs or 0]))
                for step in steps
            ],
            "text_offset": list(offsets),
        }
        return made

    def _token(self, logprob: TokenLogprob) -> JSON:
        data = self._bytes(logprob.token_id)
        return {
            "token": self._id(logprob.token_id) or data.decode(errors="replace"),
            "logprob": max(logprob.logprob, MIN_LOGPROB),
            "bytes": list(data),
            "token_id": logprob.token_id,
            "rank": logprob.rank,
        }

    def _by_text(self, chosen: TokenLogprob, others: Sequence[TokenLogprob]) -> Mapping[str, float]:
        """Map token texts to logprobs, that of the chosen one first; of the same texts, the more likely one counts."""
        found = {self._text(chosen.token_id): -math.inf}
        for one in sorted((chosen, *others), key=lambda one: -one.logprob):
            text = self._text(one.token_id)
            found[text] = max(found.get(text, -math.inf), one.logprob, MIN_LOGPROB)
        return found

    def _text(self, token_id: int) -> str:
        """Return the text of a token, or its bytes in OpenAI's format if they are not valid UTF-8."""
        data = self._bytes(token_id)
        try:
            return self._id(token_id) or data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _id(self, token_id: int) -> str:
        """Return how the request names tokens: by their ids; "" by their texts."""
        return f"token_id:{token_id}" if self.request.tokens_as_ids else ""

    def _bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; none for a padding id of the model."""
        pieces = self.tokenizer.pieces
        return pieces.as_bytes(token_id) if token_id in pieces.table else b""


def _shown(step: StepLogprobs, top: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    """The tokens of ``top_logprobs``: the most likely ones, and then those of ``logprob_token_ids``."""
    ids = {one.token_id for one in top}
    return [*top, *(one for one in step.requested if one.token_id not in ids)]


class TextOffsets:
    """Computes the character offsets of the tokens of a completion, one token at a time."""

    def __init__(self, tokens: TokenBodies, prompt_ids: Sequence[int]) -> None:
        self._detokenizer = Detokenizer(tokens.tokenizer, prompt_ids, tokens.request.params.skip_special_tokens)
        self._length = 0

    def push(self, token_id: int) -> int:
        """Return the number of final characters before this token. A stop string may still cut the text before it."""
        start = self._length
        self._length += len(self._detokenizer.push(token_id))
        return start


MAX_MESSAGE, MAX_FIELD_NAME = 2000, 100
"""Maximum characters of an error message and of its field name: both may quote the client."""
MAX_VALIDATION_ENTRIES = 100
"""Maximum entries in each list of ``validation``."""

_MODEL_FAILED = "the model failed"
_Output = TypeVar("_Output", CompletionOutput, CompletionChunk)


class ResponseHead(NamedTuple):
    """The fields at the start of every response. created: Unix time."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None = None

    def body(self, kind: str) -> JSON:
        """Return the fields of a response. kind: the value of ``object``."""
        named = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return named if self.system_fingerprint is None else {**named, "system_fingerprint": self.system_fingerprint}


def completion_body(
    head: ResponseHead,
    request: ParsedRequest,
    completions: Sequence[Completion],
    tokenizer: Tokenizer,
    collect: Collect = list,
) -> JSON:
    """Return the response body of ``/v1/completions``. completions: one per prompt."""
    returned, tokens = [select_outputs(request, one) for one in completions], TokenBodies(request, tokenizer)

    def choices() -> Iterator[JSON]:
        count = 0
        for index, completion in enumerate(returned):
            echo = Echo(tokens, index, completion.prompt_token_ids) if request.echo else None
            prefix = "" if echo is None else echo.text
            for output in completion.outputs:
                logprobs = _columns(tokens, echo, completion, output) if request.returns_logprobs else None
                choice = {"index": count, "text": prefix + output.text, **end_of_choice(output, logprobs)}
                choice |= _prompt_ids(request, completion, collect)
                first = output is completion.outputs[0]
                choice |= tokens.prompt(completion.prompt_logprobs if first else None, collect)
                yield choice
                count += 1

    return {
        **head.body("text_completion"),
        "choices": collect(choices()),
        "usage": usage_body(total_usage(completion.usage for completion in returned)),
    }


def chat_body(
    head: ResponseHead, request: ParsedRequest, completion: Completion, tokenizer: Tokenizer, collect: Collect = list
) -> JSON:
    """Return the response body of ``/v1/chat/completions``."""
    completion, tokens = select_outputs(request, completion), TokenBodies(request, tokenizer)

    def choice(output: CompletionOutput) -> JSON:
        content = collect(map(tokens.step, output.logprobs or ()))
        logprobs = {"content": content, "refusal": None} if request.returns_logprobs else None
        return {"index": output.index, "message": _message(request, output), **end_of_choice(output, logprobs)}

    made = head.body("chat.completion")
    made |= {"choices": collect(map(choice, completion.outputs)), "usage": usage_body(completion.usage)}
    return made | _prompt_ids(request, completion, collect) | tokens.prompt(completion.prompt_logprobs, collect)


def _prompt_ids(request: ParsedRequest, completion: Completion, collect: Collect) -> JSON:
    """Return the token ids of the prompt, if requested, else null, as vLLM does."""
    return {"prompt_token_ids": collect(completion.prompt_token_ids) if request.return_token_ids else None}


def _message(request: ParsedRequest, output: CompletionOutput) -> JSON:
    """Return the message of a choice. Its content is null if it has tool calls only."""
    calls = [tool_call_body(call.id, call.name, call.arguments_json) for call in output.tool_calls]
    text = request.echoed_message + output.text
    content = None if calls and not text else text
    message: JSON = {"role": "assistant", "content": content, "refusal": None}
    if output.reasoning is not None and request.include_reasoning:
        message |= reasoning_body(output.reasoning)
    return {**message, "tool_calls": calls} if calls else message


def reasoning_body(text: str) -> JSON:
    """Return reasoning in a message or delta, under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def tool_call_body(call_id: str | None, name: str | None, arguments: str) -> JSON:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def select_outputs(request: ParsedRequest, completion: Completion) -> Completion:
    """Select the outputs to return: the n of best_of with the highest mean logprob per token.

    They are renumbered, best first. The usage counts all generated tokens; none if ``max_tokens`` was 0.
    """
    outputs, usage = completion.outputs, completion.usage
    if len(outputs) > request.params.n:
        best = sorted(outputs, key=_mean_logprob, reverse=True)[: request.params.n]  # stable: ties keep their order
        outputs = tuple(replace(output, index=index) for index, output in enumerate(best))
    if not request.returns_logprobs:
        outputs = tuple(output if output.logprobs is None else replace(output, logprobs=None) for output in outputs)
    if request.prompt_only:
        outputs, usage = tuple(map(without_output, outputs)), replace(usage, completion_tokens=0)
    return replace(completion, outputs=outputs, usage=usage)


def without_output(output: _Output) -> _Output:
    """Remove the generated text, as if ``max_tokens`` of 0 had been reached."""
    logprobs = None if output.logprobs is None else ()
    if output.finish_reason in ("stop", "length"):
        output = replace(output, finish_reason="length", stop_reason=None)
    return replace(output, text="", token_ids=(), logprobs=logprobs, validation=None)


def failure_message(stop_reason: str | int | None) -> str:
    """Return the error message for a client. Messages of the model may contain paths and are replaced."""
    text = str(stop_reason)
    return _MODEL_FAILED if text.startswith(_MODEL_FAILED) else text


def error_body(
    message: str, param: str | None = None, code: str | None = None, kind: str = "invalid_request_error"
) -> JSON:
    """Return OpenAI's error object. param: the field at fault. Long texts are cut."""
    named = None if param is None else _truncate(param, MAX_FIELD_NAME)
    return {"error": {"message": _truncate(message, MAX_MESSAGE), "type": kind, "param": named, "code": code}}


def validation_body(validation: Validation) -> JSON:
    """Return the field ``validation`` of a choice: keywords of its schema were ignored."""
    return {name: _first_entries(texts) for name, texts in validation._asdict().items()}


def _first_entries(texts: Sequence[str]) -> list[str]:
    more = [f"and {len(texts) - MAX_VALIDATION_ENTRIES} more"] if len(texts) > MAX_VALIDATION_ENTRIES else []
    return [*(_truncate(text, MAX_MESSAGE) for text in texts[:MAX_VALIDATION_ENTRIES]), *more]


def usage_body(usage: Usage, *, final: bool = True) -> JSON:
    """Return the ``usage`` object. final: False for the tokens so far, whose details are not known yet."""
    made: JSON = {name: getattr(usage, name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    if final:
        made["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
        if usage.reasoning_tokens:
            made["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return made


def total_usage(usages: Iterable[Usage]) -> Usage:
    counts = [(one.prompt_tokens, one.completion_tokens, one.cached_tokens, one.reasoning_tokens) for one in usages]
    return Usage(*map(sum, zip(*counts, strict=True)))


def end_of_choice(output: Any, logprobs: JSON | None, count: int | None = None, *, last: bool = True) -> JSON:
    """Return the fields of a choice after its text. output: a CompletionOutput, or a choice of a stream.

    count: how many of its tokens; None: all. last: whether it ends.
    """
    made: JSON = {
        "logprobs": logprobs,
        "finish_reason": output.finish_reason if last else None,
        "seed": output.seed,
        "token_ids": list(output.token_ids[:count]),
    }
    if last:
        made["stop_reason"] = output.stop_reason
        if output.validation is not None:
            made["validation"] = validation_body(output.validation)
    return made


def _columns(tokens: TokenBodies, echo: Echo | None, completion: Completion, output: CompletionOutput) -> JSON:
    offsets, end = TextOffsets(tokens, completion.prompt_token_ids), len(output.text)
    first = 0 if echo is None else len(echo.text)
    starts = [first + min(offsets.push(token), end) for token in output.token_ids]
    own = tokens.columns(output.token_ids, output.logprobs or (), starts)
    return own if echo is None else echo.prepend_logprobs(own, completion.prompt_logprobs)


def _mean_logprob(output: CompletionOutput) -> float:
    total = output.cumulative_logprob
    return -math.inf if total is None else total / len(output.token_ids)


def _truncate(text: str, length: int) -> str:
    text = text if len(text) <= length else text[: length - 3] + "..."
    return text.encode(errors="replace").decode()  # JSON can contain lone surrogates, UTF-8 cannot


class Echo:
    """The text before each completion of a prompt, for a request with ``echo``.

    A text prompt is repeated as it is, token ids as their text. A character that the prompt begins and the completion
    ends belongs to the completion. Creating one tokenizes the whole prompt.
    """

    def __init__(self, tokens: TokenBodies, index: int, prompt_ids: Sequence[int]) -> None:
        self._tokens, self._prompt_ids = tokens, prompt_ids
        prompt = tokens.request.prompts[index]
        self.text = prompt if isinstance(prompt, str) else _text(tokens, prompt)
        self._offsets = list(self._token_offsets(prompt)) if tokens.request.returns_logprobs else []
        self._columns: JSON | None = None

    def prepend_logprobs(self, own: JSON, logprobs: PromptLogprobs | None) -> JSON:
        """Return the logprobs of a completion after those of its prompt."""
        if not self._offsets:
            return own
        if self._columns is None:
            steps = (None,) * len(self._prompt_ids) if logprobs is None else logprobs
            self._columns = self._tokens.columns(self._prompt_ids, steps, self._offsets)
        return {name: [*column, *own[name]] for name, column in self._columns.items()}

    def _token_offsets(self, prompt: Prompt) -> Iterator[int]:
        """Yield the offset of each token of the prompt. A special token that is not in the text has no length."""
        tokenizer, length = self._tokens.tokenizer, 0
        shows_special = isinstance(prompt, str) or not self._tokens.request.params.skip_special_tokens
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        for token in self._prompt_ids:
            yield min(length, len(self.text))
            if token in tokenizer.special_ids:
                special = tokenizer.pieces.as_bytes(token).decode(errors="replace")
                if not (shows_special and self.text.startswith(special, length)):
                    continue
            length += len(detokenizer.push(token))


def _text(tokens: TokenBodies, prompt: Sequence[int]) -> str:
    """Return the text of token ids, without an incomplete character that the completion may end."""
    request, tokenizer = tokens.request, tokens.tokenizer
    skip = request.params.skip_special_tokens
    tail = "" if request.prompt_only else Detokenizer(tokenizer, prompt, skip).close()
    return tokenizer.decode(prompt, skip).removesuffix(tail)
