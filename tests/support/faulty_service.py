"""A service in this process that samples as documented, or with one fault that a conformance run must find."""

from __future__ import annotations

import json
import threading
import time
from functools import cache
from typing import Any

import numpy as np

from nucleate.comparison.service_client import Client, RequestError

V = 1100
WORDS = ["ha", *(a + b + c + d for a in "bdfgklmnprst" for b in "aeiou" for c in "bdgklmnrst" for d in "ao")][:V]
IDS = {word: index for index, word in enumerate(WORDS)}
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 1e9),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (-1, 2**31),
    "n": (1, 128),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (1e-9, 1e9),
    "max_tokens": (1, 1000),
    "seed": (0, 2**64),
}
OTHERS = {"model", "prompt", "messages", "stop", "logprobs", "top_logprobs", "logit_bias", "stream", "stream_options"}
FAULTS: dict[str, set[str]] = {
    "seed ignored": {"seed"},
    "seed constant": {"seed"},
    "seed shared with others": {"seed among others"},
    "always the same seed without one": {"no seed"},
    "repeat penalty by default": {"no default penalties"},
    "temperature ignored": {"temperature", "temperature 0 repeats"},
    "temperature squared": {"temperature 0.6", "temperature, then top_p", "temperature, then min_p"},
    "top_k keeps one more": {"top_k 1 is greedy", "top_k keeps"},
    "top_k ignored": {"top_k"},
    "top_p without the token that reaches it": {"top_p keeps", "temperature, then top_p", "top_k, then top_p"},
    "top_p first": {"temperature, then top_p", "top_k, then top_p", "min_p, then top_p"},
    "top_p ignored": {"top_p"},
    "min_p first": {"temperature, then min_p"},
    "min_p of the probability itself": {"min_p keeps", "temperature, then min_p", "min_p, then top_p"},
    "min_p ignored": {"min_p"},
    "logit_bias ignored": {"logit_bias"},
    "n ignored": {"n"},
    "n copies": {"choices differ"},
    "stop ignored": {"stop"},
    "stop kept": {"stop"},
    "stop kept in a stream": {"stop in a stream"},
    "only the first stop string": {"several stop strings"},
    "penalties count the prompt": {"the prompt"},
    "frequency counts once": {"amounts"},
    "repetition ignores the prompt": {"repetition"},
    "logprobs null": {"logprobs"},
    "logprobs after temperature": {"raw logprobs"},
    "logprobs name another token": {"sampled token"},
    "vocabulary spelling": set(),
    "one logprob less": {"number of logprobs"},
    "draws flatter than the logprobs": {"temperature 1", "temperature 0.6"},
    "usage of one choice": {"usage of n"},
    "usage null": {"usage", "usage of n", "usage of a stream"},
    "stream without usage": {"usage of a stream"},
    "stream loses the last token": {"stream", "stop in a stream"},
    "status 500 for a temperature below 0": {"temperature -1"},
    "values out of range accepted": {f"top_k {-5}", "top_p 1.5", "min_p 1.5"},
    "unknown fields accepted": {"temprature 0.5"},
    "errors name no field": {"top_p 1.5", "min_p 1.5"},
    "malformed JSON is 500": {"malformed JSON"},
}
"""By the name of a fault: checks that must differ."""


@cache
def model(context: tuple[int, ...]) -> np.ndarray:
    """The logits after the last three tokens; three equal ones are continued by the same."""
    x = np.random.default_rng(hash(context) % 2**32).normal(0, 2.2, V)
    if len({*context}) == 1:
        x[context[0]] = np.delete(x, context[0]).max() + 1.7
    return x


class FaultySampler:
    """Draws the tokens of one choice."""

    def __init__(self, fault: str, body: dict[str, Any]) -> None:
        self.fault = fault
        self.sums: dict[tuple[int, ...], np.ndarray] = {}
        self.value = {
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "logit_bias": {},
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_tokens": 16,
            "repetition_penalty": 1.3 if fault == "repeat penalty by default" else 1.0,
            **{name: value for name, value in body.items() if value is not None},
        }
        for name in ("temperature", "top_k", "top_p", "min_p", "logit_bias"):
            if fault == f"{name} ignored":
                self.value[name] = {"temperature": 1.0, "top_p": 1.0, "logit_bias": {}}.get(name, 0)

    def shifted(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> np.ndarray:
        """Scores after bias and penalties."""
        x = model((prompt + output)[-3:]).copy()
        for token, amount in self.value["logit_bias"].items():
            x[int(token)] += amount
        seen = [*{*(output if self.fault == "repetition ignores the prompt" else prompt + output)}]
        r = self.value["repetition_penalty"]
        x[seen] = np.where(x[seen] > 0, x[seen] / r, x[seen] * r)
        counted = prompt + output if self.fault == "penalties count the prompt" else output
        for token in {*counted}:
            count = 1 if self.fault == "frequency counts once" else counted.count(token)
            x[token] -= self.value["frequency_penalty"] * count + self.value["presence_penalty"]
        return x

    def distribution(self, x: np.ndarray) -> np.ndarray:
        """Probabilities after temperature and truncation."""
        t = self.value["temperature"]
        if t == 0:
            return np.eye(V)[int(np.argmax(x))]
        if self.fault == "temperature squared":
            t = t * t
        if self.fault == "draws flatter than the logprobs":
            t = t * 1.25
        order = [self.temperature, self.top_k, self.min_p, self.top_p]
        if self.fault == "top_p first":
            order = [self.top_p, *order[:3]]
        if self.fault == "min_p first":
            order = [self.min_p, self.temperature, self.top_k, self.top_p]
        p = np.exp(x - x.max())
        self.t = t
        for stage in order:
            p = stage(p / p.sum())
        return p / p.sum()

    def temperature(self, p: np.ndarray) -> np.ndarray:
        return p ** (1 / self.t)

    def top_k(self, p: np.ndarray) -> np.ndarray:
        k = self.value["top_k"]
        if k <= 0:
            return p
        k += self.fault == "top_k keeps one more"
        return np.where(p >= np.sort(p)[::-1][min(k, V) - 1], p, 0.0)

    def min_p(self, p: np.ndarray) -> np.ndarray:
        relative = self.fault != "min_p of the probability itself"
        keep = p >= self.value["min_p"] * (p.max() if relative else 1.0)
        return np.where(keep | (p == p.max()), p, 0.0)

    def top_p(self, p: np.ndarray) -> np.ndarray:
        order = np.argsort(-p, kind="stable")
        reached = np.cumsum(p[order])
        strict = self.fault == "top_p without the token that reaches it"
        keep = reached <= self.value["top_p"] if strict else reached - p[order] < self.value["top_p"]
        keep[0] = True
        made = np.zeros(V)
        made[order[keep]] = p[order[keep]]
        return made


class FaultyService(Client):
    """A client whose service is in this process. fault: a key of ``FAULTS``; "" for none."""

    def __init__(self, fault: str = "", *, chat: bool = False, without: tuple[str, ...] = ()) -> None:
        super().__init__("http://service.test")
        self.fault, self.chat, self.without, self.running = fault, chat, without, 0
        self.lock = threading.Lock()
        self.unseeded = iter(range(10**9, 10**12, 1000))

    def send(self, path: str, body: Any = None) -> str:
        self.requests += 1
        if path == "/v1/models":
            return json.dumps({"data": [{"id": "faulty"}]})
        if path != ("/v1/chat/completions" if self.chat else "/v1/completions"):
            raise RequestError(404, '{"detail": "Not Found"}')
        if isinstance(body, bytes):
            raise RequestError(500 if self.fault == "malformed JSON is 500" else 400, "not JSON")
        self.check(body)
        with self.lock:
            self.running += 1
        if self.fault == "seed shared with others":
            time.sleep(0.005)
        try:
            return self.respond(body)
        finally:
            self.running -= 1

    def check(self, body: dict[str, Any]) -> None:
        def refuse(field: str, text: str) -> None:
            named = "" if self.fault == "errors name no field" else f"{field} "
            raise RequestError(400, json.dumps({"error": {"message": f"{named}{text}", "param": None}}))

        for name, value in body.items():
            if name in self.without or (name not in RANGES and name not in OTHERS):
                if self.fault != "unknown fields accepted" or name in self.without:
                    refuse(name, "is unknown")
            elif name in RANGES:
                low, high = RANGES[name]
                if isinstance(value, str) or not low <= value <= high:
                    if name == "temperature" and self.fault == "status 500 for a temperature below 0":
                        raise RequestError(500, "Internal Server Error")
                    if self.fault != "values out of range accepted" or name not in ("top_k", "top_p", "min_p"):
                        refuse(name, "is out of range")
        if any(int(token) >= V for token in body.get("logit_bias") or ()):
            refuse("logit_bias", "names a token that does not exist")

    def respond(self, body: dict[str, Any]) -> str:
        text = body["messages"][0]["content"] if self.chat else body["prompt"]
        prompt = tuple(IDS.get(word, sum(map(ord, word)) % V) for word in text.split())
        seed = body.get("seed")
        if seed is None:
            seed = 5 if self.fault == "always the same seed without one" else next(self.unseeded)
        if self.fault == "seed ignored":
            seed = next(self.unseeded)
        if self.fault == "seed constant" and body.get("seed") is not None:
            seed = 3
        if self.fault == "seed shared with others":
            seed += self.running > 1
        count = 1 if self.fault == "n ignored" else body.get("n") or 1
        sampler = FaultySampler(self.fault, body)
        seeds = [seed if self.fault == "n copies" else seed + index for index in range(count)]
        choices = [self.choice(sampler, prompt, body, index, one) for index, one in enumerate(seeds)]
        completion = sum(one.pop("count") for one in choices)
        if self.fault == "usage of one choice":
            completion //= count
        total = len(prompt) + completion
        usage = {"prompt_tokens": len(prompt), "completion_tokens": completion, "total_tokens": total}
        usage = None if self.fault == "usage null" else usage
        if body.get("stream"):
            return self.stream(choices[0], usage, body)
        return json.dumps({"choices": choices, "usage": usage})

    def choice(
        self, sampler: FaultySampler, prompt: tuple[int, ...], body: dict[str, Any], index: int, seed: int
    ) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        output: tuple[int, ...] = ()
        steps, text, reason, stops = [], "", "length", body.get("stop") or []
        if self.fault == "stop ignored":
            stops = []
        if self.fault == "only the first stop string":
            stops = stops[:1]
        while len(output) < sampler.value["max_tokens"]:
            if output not in sampler.sums:
                sampler.sums[output] = np.cumsum(sampler.distribution(sampler.shifted(prompt, output)))
            token = min(int(np.searchsorted(sampler.sums[output], rng.random(), side="right")), V - 1)
            steps.append((token, prompt + output))
            output += (token,)
            text += f" {WORDS[token]}"
            found = [(text.index(stop), stop) for stop in stops if stop in text]
            if found:
                at, stop = min(found)
                keep = self.fault == "stop kept" or (self.fault == "stop kept in a stream" and bool(body.get("stream")))
                text, reason = text[: at + len(stop) * keep], "stop"
                break
        made = {"index": index, "finish_reason": reason, "count": len(output)}
        made |= {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return made | {"logprobs": self.logprobs(sampler, steps, body)}

    def logprobs(self, sampler: FaultySampler, steps: list[Any], body: dict[str, Any]) -> Any:
        top = body.get("top_logprobs") if self.chat else body.get("logprobs")
        if top is None or self.fault == "logprobs null":
            return None
        tokens, values, lists = [], [], []
        for token, context in steps:
            x = model(context[-3:])
            if self.fault == "logprobs after temperature" and sampler.value["temperature"]:
                x = x / sampler.value["temperature"]
            x = x - x.max() - np.log(np.exp(x - x.max()).sum())
            best = [*np.argsort(-x)[: top - (self.fault == "one logprob less" and top == 3)]]
            names = {f" {WORDS[each]}": float(x[each]) for each in [*best, *(() if token in best else (token,))]}
            other = self.fault == "logprobs name another token"
            tokens.append(f" {WORDS[best[1] if other and len(best) > 1 else token]}")
            values.append(float(x[token]))
            lists.append(names)
        if self.fault == "vocabulary spelling":
            tokens = [token.replace(" ", "\u0120") for token in tokens]
            lists = [{name.replace(" ", "\u0120"): value for name, value in each.items()} for each in lists]
        if not self.chat:
            return {"tokens": tokens, "token_logprobs": values, "top_logprobs": lists}
        rows = [[{"token": name, "logprob": value} for name, value in each.items()] for each in lists]
        steps = [{"token": a, "logprob": b, "top_logprobs": c} for a, b, c in zip(tokens, values, rows, strict=True)]
        return {"content": steps}

    def stream(self, choice: dict[str, Any], usage: Any, body: dict[str, Any]) -> str:
        text = choice["message"]["content"] if self.chat else choice["text"]
        parts = text.split(" ")
        if self.fault == "stream loses the last token":
            parts = parts[:-1]
        events = []
        for index, part in enumerate(parts):
            piece = part if index == 0 else f" {part}"
            made = {"delta": {"content": piece}} if self.chat else {"text": piece}
            last = index == len(parts) - 1
            events.append(
                {"choices": [{"index": 0, **made, "finish_reason": choice["finish_reason"] if last else None}]}
            )
        if (body.get("stream_options") or {}).get("include_usage") and self.fault != "stream without usage":
            events.append({"choices": [], "usage": usage})
        return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
