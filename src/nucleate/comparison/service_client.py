"""A client of OpenAI-compatible services: requests, their responses, and many draws of one prompt.

It uses ``/v1/completions``, or ``/v1/chat/completions`` where there is none, and reads the logprobs of both. Needs only
the standard library.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from nucleate.comparison.exact_tests import Label, NotTested
from nucleate.parameters.parameter import ParameterError

TOKENS = 16
"""Length of the texts that are compared."""


class RequestError(Exception):
    """The service answered with an error. status: of HTTP. raw: the whole body."""

    def __init__(self, status: int, raw: str) -> None:
        self.status, self.raw = status, raw
        try:
            value = json.loads(raw)
            error = value.get("error", value) if isinstance(value, dict) else value
            message = error.get("message") or error.get("detail") or error if isinstance(error, dict) else error
        except ValueError:
            message = raw
        text = message if isinstance(message, str) else json.dumps(message)
        super().__init__(f"status {status}: {' '.join(text.split())[:200]}")


class ServiceError(Exception):
    """The service cannot be reached, or answers with something that is not its API."""


class Client:
    """Sends requests to a service, and counts them. Threads may share it.

    url: of the service, with or without ``/v1``. key: sent as a bearer token. timeout: seconds per request. budget: the
    largest number of requests. Raises ParameterError.
    """

    def __init__(self, url: str, key: str | None = None, timeout: float = 120.0, budget: int = 100_000) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise ParameterError("url", f"url must be http://HOST:PORT or https://HOST:PORT, got {url!r:.200}")
        self.url, self._parts, self._timeout, self._budget = url, parts, timeout, budget
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._lock = threading.Lock()
        self.requests = 0

    def send(self, path: str, body: Any = None) -> str:
        """Send a request, GET without a body, and return the body of the response. body: JSON, or bytes.

        Raises RequestError for a status that is not 200, ServiceError without a response, and NotTested if the budget
        is spent.
        """
        with self._lock:
            if self.requests >= self._budget:
                raise NotTested(f"the budget of {self._budget:,} requests is spent")
            self.requests += 1
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        secure = self._parts.scheme == "https"
        kind = partial(http.client.HTTPSConnection, context=ssl.create_default_context()) if secure else None
        try:
            connection = (kind or http.client.HTTPConnection)(self._parts.netloc, timeout=self._timeout)
            try:
                connection.request("GET" if data is None else "POST", self._base + path, data, self._headers)
                response = connection.getresponse()
                text = response.read().decode("utf-8", "replace")
            finally:
                connection.close()
        except TimeoutError:
            raise ServiceError(f"{self.url} did not answer within {self._timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise ServiceError(f"{self.url} cannot be reached: {error or type(error).__name__}") from None
        if response.status != 200:
            raise RequestError(response.status, text)
        return text

    def json(self, path: str, body: Any = None) -> dict[str, Any]:
        """Send a request and return the object in the response. Raises ServiceError if there is none."""
        text = self.send(path, body)
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ServiceError(f"the response of {path} is not a JSON object: {text[:80]!r}")
        return value


class Choice(NamedTuple):
    """A choice of a response. tokens, top: of the logprobs, per position; empty without logprobs."""

    text: str
    finish_reason: str | None
    tokens: tuple[Label, ...]
    logprobs: tuple[float, ...]
    top: tuple[Mapping[Label, float], ...]


class Response(NamedTuple):
    """A response. usage: {} if there is none."""

    choices: tuple[Choice, ...]
    usage: Mapping[str, Any]

    @property
    def text(self) -> str:
        return self.choices[0].text


def read_response(value: Mapping[str, Any]) -> Response:
    """Read a completion or chat completion. Raises ServiceError."""
    given = value.get("choices")
    if not isinstance(given, list) or not given or not all(isinstance(one, dict) for one in given):
        raise ServiceError(f"the response has no choices: {json.dumps(value)[:120]}")
    usage = value.get("usage")
    try:
        ordered = sorted(given, key=lambda one: one.get("index") or 0)
        return Response(tuple(map(_read_choice, ordered)), usage if isinstance(usage, dict) else {})
    except (TypeError, AttributeError):
        raise ServiceError(f"the response has unexpected choices: {json.dumps(given)[:120]}") from None


def _read_choice(one: Mapping[str, Any]) -> Choice:
    message = one.get("message") or one.get("delta") or {}
    text = one.get("text") if isinstance(one.get("text"), str) else message.get("content")
    found = one.get("logprobs") or {}
    tokens: list[Label] = []
    values: list[float] = []
    top: list[dict[Label, float]] = []
    if isinstance(found, dict) and isinstance(found.get("content"), list):  # of a chat
        for step in found["content"]:
            tokens.append(step.get("token"))
            values.append(step.get("logprob"))
            top.append({each.get("token"): each.get("logprob") for each in step.get("top_logprobs") or ()})
    elif isinstance(found, dict):
        tokens, values = [*(found.get("tokens") or ())], [*(found.get("token_logprobs") or ())]
        top = [each if isinstance(each, dict) else {} for each in found.get("top_logprobs") or ()]
    named = [{spelled(label): value for label, value in each.items()} for each in top]
    return Choice(text or "", one.get("finish_reason"), tuple(map(spelled, tokens)), tuple(values), tuple(named))


def spelled(label: Label) -> Label:
    """Return the name of a token with spaces, which some vocabularies write as other characters."""
    return label.replace("\u0120", " ").replace("\u2581", " ") if isinstance(label, str) else label


class Service:
    """Completes prompts.

    client: of the service. model: its name in requests; None for the first one that the service lists. concurrency:
    requests at the same time, where a request gives one draw only. seed: determines all seeds that are sent. Raises
    ServiceError if the service does not complete a prompt.
    """

    def __init__(self, client: Client, model: str | None = None, concurrency: int = 8, seed: int = 0) -> None:
        self.client, self.concurrency = client, concurrency
        self._next_seed = 1000 + seed * 1_000_000
        self.neutral: dict[str, Any] = {}
        """Fields that turn off what the service does by default, for draws."""
        self.num_choices = 1
        """The number of choices that a request for draws has."""
        self.has_seed = False
        self.model = self._first_model() if model is None else model
        self.path, self.chat, self.has_top_logprobs = "/v1/completions", False, False
        try:
            self.ask("Once upon a time", max_tokens=2)
        except RequestError as error:
            if error.status not in (400, 404, 405, 422, 501):
                raise ServiceError(f"{client.url}{self.path}: {error}") from None
            self.path, self.chat, self.has_top_logprobs = "/v1/chat/completions", True, True
            try:
                self.ask("Once upon a time", max_tokens=2)
            except RequestError as second:
                message = f"{client.url}: /v1/completions: {error}; /v1/chat/completions: {second}"
                raise ServiceError(message) from None

        try:
            self.ask("Once upon a time", max_tokens=1, top=2)
        except (RequestError, ServiceError):  # as in mlx_lm.server, or not at all
            self.has_top_logprobs = True

    def _first_model(self) -> str | None:
        try:
            return str(self.client.json("/v1/models")["data"][0]["id"])
        except ServiceError as error:
            if "cannot be reached" in str(error):
                raise
            return None
        except (RequestError, LookupError, TypeError):
            return None

    def body(self, prompt: str, max_tokens: int = TOKENS, top: int | None = None, **fields: Any) -> dict[str, Any]:
        """Return the body of a request. top: number of logprobs per position; None for no logprobs."""
        body: dict[str, Any] = {} if self.model is None else {"model": self.model}
        body |= {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        if top is not None:
            body |= {"logprobs": True, "top_logprobs": top} if self.has_top_logprobs else {"logprobs": top}
        return {**body, "max_tokens": max_tokens, **fields}

    def ask(self, prompt: str, **fields: Any) -> Response:
        """Send a request; ``fields`` as for ``body``."""
        return read_response(self.client.json(self.path, self.body(prompt, **fields)))

    def stream(self, prompt: str, **fields: Any) -> tuple[str, list[str], Mapping[str, Any]]:
        """Send a request with ``stream``. Returns the text, the finish reasons and the last usage."""
        text, reasons, usage = "", list[str](), dict[str, Any]()
        for line in self.client.send(self.path, self.body(prompt, stream=True, **fields)).splitlines():
            if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                try:
                    event = json.loads(data)
                    usage = event.get("usage") or usage
                    choices = [*map(_read_choice, event.get("choices") or ())]
                except (ValueError, TypeError, AttributeError):
                    raise ServiceError(f"the stream has the event {data[:80]!r}") from None
                text += "".join(one.text for one in choices)
                reasons += [one.finish_reason for one in choices if one.finish_reason]
        return text, reasons, usage

    def seeds(self, count: int) -> range:
        """Return seeds that no request had so far."""
        self._next_seed += count
        return range(self._next_seed - count, self._next_seed)

    def together(self, calls: Sequence[Callable[[], Response]]) -> list[Response]:
        """Make several requests at the same time."""
        with ThreadPoolExecutor(max(1, min(self.concurrency, len(calls)))) as pool:
            return [*pool.map(lambda call: call(), calls)]

    def sample(self, count: int, prompt: str, **fields: Any) -> list[Choice]:
        """Return that many choices with fresh seeds."""
        at_once = self.num_choices
        sizes = [min(at_once, count - start) for start in range(0, count, at_once)]
        calls = []
        for size in sizes:
            more: dict[str, Any] = {"n": size} if size > 1 else {}
            if self.has_seed:
                more["seed"] = self.seeds(size)[0]
            calls.append(partial(self.ask, prompt, **{**self.neutral, **fields, **more}))
        # services with n run the choices together themselves
        found = [call() for call in calls] if at_once > 1 else self.together(calls)
        return [choice for response in found for choice in response.choices]
