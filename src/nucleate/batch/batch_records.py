"""Reads the lines of a batch from a file of any size, parses them, and builds their output records.

A line is a request of OpenAI's Batch API, or a prompt: a JSON string, or an object with prompt or messages and any
fields of SamplingParams. Errors are not raised but returned, for the record of the line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

from nucleate.outputs import Completion, CompletionOutput, to_json
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError, read_json, unknown
from nucleate.server.openai.endpoints import CHAT, ENDPOINTS, PLAIN, Endpoint
from nucleate.server.openai.requests import ParsedRequest
from nucleate.server.openai.responses import ResponseHead, chat_body, completion_body, error_body, usage_body
from nucleate.tokenization.tokenizer import Tokenizer

MAX_LINE_BYTES = 16 << 20
"""Maximum size of a line. A longer one is an error, and is not kept in memory."""
_BLANK = b" \t\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonLine(NamedTuple):
    """A line that is not empty. number: from 1, counting empty lines. data: None if the line is too long."""

    number: int
    digest: int  #: 64-bit hash of the stripped line, not 0
    data: bytes | None

    @property
    def id(self) -> str:
        """The id of its output record."""
        return f"line-{self.number}-{self.digest:016x}"


def lines(stream: BinaryIO, max_bytes: int = MAX_LINE_BYTES) -> Iterator[JsonLine]:
    """Yield the lines of a stream that are not empty, without byte order marks."""
    number = 0
    while data := stream.readline(max_bytes + 1):
        number += 1
        if len(data) > max_bytes and not data.endswith(b"\n"):
            yield JsonLine(number, _digest(chain([data], _rest(stream, max_bytes))), None)
        elif data := data.removeprefix(_BYTE_ORDER_MARK).strip(_BLANK):
            yield JsonLine(number, _digest([data]), data)


def _rest(stream: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """Yield the rest of a line in parts."""
    while data := stream.readline(max_bytes):
        yield data.removesuffix(b"\n")
        if data.endswith(b"\n"):
            return


def _digest(parts: Iterable[bytes]) -> int:
    made = blake2b(digest_size=8)
    for part in parts:
        made.update(part)
    return int.from_bytes(made.digest()) or 1


_ENVELOPE = ("custom_id", "method", "url", "body")

Record = dict[str, Any]


@dataclass(frozen=True)
class LineError:
    """Why a line failed. status: the HTTP status, for OpenAI requests; param: the field at fault."""

    message: str
    code: str | None = None
    param: str | None = None
    status: int | None = None


@dataclass(frozen=True)
class BatchRequest:
    """A parsed line. number: from 1, or 0 for a row of a table; endpoint: None if the line is invalid; failure: why it
    cannot be processed."""

    id: str
    number: int
    endpoint: Endpoint | None = None
    custom_id: str | None = None
    body: Any = None
    failure: LineError | None = None


def read_line(line: JsonLine) -> BatchRequest:
    """Parse a line; errors are in ``failure``."""
    entry = BatchRequest(line.id, line.number)
    if line.data is None:
        return replace(entry, failure=LineError("the line is too long", "line_too_long"))
    try:
        value = read_json(line.data.decode(), "line")
    except UnicodeDecodeError as error:
        message = f"the line is not UTF-8: {error.reason} at byte {error.start}"
        return replace(entry, failure=LineError(message, "invalid_json"))
    except ParameterError as error:
        return replace(entry, failure=LineError(str(error), "invalid_json"))
    name = value.get("custom_id") if isinstance(value, dict) else None
    if isinstance(name, str) and name:
        entry = replace(entry, custom_id=name)
    try:
        endpoint, body = _endpoint_and_body(value)
    except ParameterError as error:
        return replace(entry, failure=LineError(str(error), "invalid_line", error.field))
    return replace(entry, endpoint=endpoint, body=body)


class LineReader:
    """Parses the lines of one batch in their order. A line with the ``custom_id`` of an earlier one is an error."""

    def __init__(self) -> None:
        self._custom_ids: set[str] = set()

    def read(self, line: JsonLine) -> BatchRequest:
        """Parse a line; errors are in ``failure``."""
        entry = read_line(line)
        if entry.custom_id in self._custom_ids and entry.failure is None:
            message = f"an earlier line has the same custom_id {shown(entry.custom_id)}"
            return replace(entry, failure=LineError(message, "duplicate_custom_id", "custom_id"))
        if entry.custom_id is not None:
            self._custom_ids.add(entry.custom_id)
        return entry


def _endpoint_and_body(value: Any) -> tuple[Endpoint, Any]:
    if isinstance(value, str):
        return PLAIN, {"prompt": value}
    if not isinstance(value, dict):
        raise ParameterError("line", f"a line must be a JSON object or string, got {shown(value)}")
    name = value.get("custom_id", "-")
    if not isinstance(name, str) or not name:
        raise ParameterError("custom_id", f"custom_id must be a non-empty string, got {shown(name)}")
    if not value.keys() & {"method", "url", "body"}:
        return PLAIN, {key: item for key, item in value.items() if key != "custom_id"}
    return _request(value)


def _request(value: Mapping[str, Any]) -> tuple[Endpoint, Any]:
    """Return the endpoint and the body of an OpenAI request."""
    for key in value:
        if key not in _ENVELOPE:
            raise unknown(key, _ENVELOPE, "field of the line")
    for key in _ENVELOPE:
        if key not in value:
            raise ParameterError(key, f"{key} is missing")
    if value["method"] != "POST":
        raise ParameterError("method", f"method must be POST, got {shown(value['method'])}")
    if not isinstance(value["url"], str) or value["url"] not in ENDPOINTS:
        raise ParameterError("url", f"url must be one of {', '.join(ENDPOINTS)}, got {shown(value['url'])}")
    return ENDPOINTS[value["url"]], value["body"]


def error_record(entry: BatchRequest, failure: LineError) -> Record:
    """Return the record of a failed line; for an OpenAI request, with the error response of the server."""
    message = f"line {entry.number}: {failure.message}" if entry.number else failure.message
    if entry.endpoint is PLAIN:
        error = {"code": failure.code or "invalid_request", "message": message, "param": failure.param}
        return {**_plain_head(entry), "error": error}
    head = {"id": entry.id, "custom_id": entry.custom_id}
    if failure.status is None:
        return {**head, "response": None, "error": {"code": failure.code, "message": message}}
    kind = "server_error" if failure.status >= 500 else "invalid_request_error"
    body = error_body(message, failure.param, failure.code, kind)
    return {**head, "response": _response(entry, failure.status, body), "error": None}


def success_record(
    entry: BatchRequest,
    parsed: ParsedRequest,
    completions: Sequence[Completion],
    tokenizer: Tokenizer,
    *,
    created: int,
    model: str,
) -> Record:
    """Return the record of a successful line. created: Unix time; model: the model name."""
    if entry.endpoint is PLAIN:
        return _plain(entry, completions[0])
    if entry.endpoint is CHAT:
        body = chat_body(ResponseHead(f"chatcmpl-{entry.id}", created, model), parsed, completions[0], tokenizer)
    else:
        body = completion_body(ResponseHead(f"cmpl-{entry.id}", created, model), parsed, completions, tokenizer)
    response = _response(entry, 200, body)
    return {"id": entry.id, "custom_id": entry.custom_id, "response": response, "error": None}


def has_failed(record: Mapping[str, Any]) -> bool:
    """Return whether a record is of a failed line."""
    response = record.get("response")
    return record.get("error") is not None or (response is not None and response["status_code"] != 200)


def _response(entry: BatchRequest, status: int, body: Record) -> Record:
    return {"status_code": status, "request_id": f"req-{entry.id}", "body": body}


def _plain_head(entry: BatchRequest) -> Record:
    named = {} if entry.custom_id is None else {"custom_id": entry.custom_id}
    return {"id": entry.id, **named, "line": entry.number}


def _plain(entry: BatchRequest, completion: Completion) -> Record:
    outputs = [_output(output) for output in completion.outputs]
    result = outputs[0] if len(outputs) == 1 else {"outputs": outputs}
    subject = {name: entry.body[name] for name in PLAIN.prompt_fields if entry.body.get(name) is not None}
    logprobs = completion.prompt_logprobs
    prompt_logprobs = {} if logprobs is None else {"prompt_logprobs": to_json(logprobs)}
    usage = usage_body(completion.usage)
    return {**_plain_head(entry), **subject, **result, **prompt_logprobs, "usage": usage, "error": None}


def _output(output: CompletionOutput) -> Record:
    """Return an output in the format of ``generate --json``; logprobs only if requested."""
    made = {name: value for name, value in to_json(output).items() if name != "index"}
    if output.logprobs is None:
        del made["logprobs"], made["cumulative_logprob"]
    return made
