"""Checks of an OpenAI-compatible service: does it sample what it says?

The checks run in the order of what they reveal: which fields change anything, identities that need no reference, draws
of one token compared with the logprobs of its position, the order of the stages, penalties, stop strings, counts, and
values out of range. A later check is not made if an earlier one shows that its fields have no effect.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from nucleate.comparison.exact_tests import (
    ORDERS,
    Check,
    Difference,
    Findings,
    Label,
    NotTested,
    Progress,
    Question,
    Stages,
    TopTokens,
    apply,
    fit,
    follow,
    order_questions,
    pick,
    power_statement,
    questions,
    run_checks,
    surely,
)
from nucleate.comparison.field_checks import PROMPTS, REPETITIONS, FieldChecks, stop_string
from nucleate.comparison.service_client import RequestError, Service, ServiceError


class ServiceChecks(FieldChecks):
    """The checks of one service, with what they have learned about it so far. draws: per exact test."""

    # exact tests

    @cached_property
    def prompts(self) -> list[tuple[str, TopTokens]]:
        """Prompts with the distributions of their next token, those with the most likely tokens first."""
        self.need("logprobs")
        found = []
        for prompt in PROMPTS:
            choice = self.ask(prompt, **{**self.neutral, "max_tokens": 1, "temperature": 1.0}, top=self.top).choices[0]
            top = {label: value for label, value in (choice.top or ({},))[0].items() if value is not None}
            if len(top) > 2:
                if choice.tokens and min(top, key=top.__getitem__) == choice.tokens[0]:
                    del top[choice.tokens[0]]  # the sampled token is added to the list, whatever its rank
                if self.spelling == "stripped":
                    names = {str(label).strip() for label in top}
                    top = {
                        name: math.log(sum(math.exp(top[label]) for label in top if str(label).strip() == name))
                        for name in names
                    }
                listed = TopTokens.of(top)
                special = any(isinstance(label, str) and re.fullmatch(r"<.*>|", label) for label in listed.labels[:12])
                found.append((special, -int((listed.p >= 0.02).sum()), float(listed.p[0]), prompt, listed))
        if not found:
            raise NotTested("no prompt has logprobs")
        return [(prompt, listed) for *_, prompt, listed in sorted(found, key=lambda each: each[:3])]

    def _sampled_token(self) -> str:
        if self.names_other_tokens:
            raise Difference(self.names_other_tokens)
        return "the logprobs name the token that the text has"

    def drawer(self, prompt: str) -> Callable[[int, Mapping[str, Any]], Counter[Label]]:
        """Return the function that draws the next token of a prompt."""

        def draw(count: int, fields: Mapping[str, Any]) -> Counter[Label]:
            more: dict[str, Any] = {"top": 1} if self.spelling == "tokens" else {}
            choices = self.service.sample(count, prompt, **{**fields, **more, "max_tokens": 1})
            if self.spelling == "tokens":
                return Counter(one.tokens[0] if one.tokens else "" for one in choices)
            return Counter(one.text.strip() if self.spelling == "stripped" else one.text for one in choices)

        return draw

    def _follows(self, stages: Stages) -> str:
        self.need(*dict(stages))
        prompt, listed = self.prompts[0]
        expected = surely(listed, stages)
        if not stages:
            self.power = power_statement(expected, self.draws)
        others = {"temperature 1": apply(listed, ())} if stages else {}
        return follow(self.drawer(prompt), dict(stages), expected, others, self.draws)

    def _picked(self, make: Callable[[TopTokens], Iterable[Question]], *, alone: bool) -> str:
        """Run the exact test that the first possible distribution allows. alone: name the case of one stage only."""
        for index, (prompt, listed) in enumerate(self.prompts):
            try:
                stages, others = pick(listed, make(listed))
            except NotTested:
                if index + 1 < len(self.prompts):
                    continue
                raise
            more: dict[str, Stages] = {f"{stage[0]} alone": (stage,) for stage in stages} if alone else {}
            named = {name: apply(listed, other) for name, other in {**more, "no truncation": (), **others}.items()}
            return follow(self.drawer(prompt), dict(stages), surely(listed, stages), named, self.draws)
        raise NotTested("there are no logprobs")

    def _truncation(self, field: str) -> str:
        self.need(field, "logprobs")
        return self._picked(partial(questions, field), alone=False)

    def _order(self, first: str, second: str) -> str:
        self.need(first, second, "logprobs")

        return self._picked(partial(order_questions, first, second), alone=True)

    def _logprobs_are_raw(self) -> str:
        self.need("logprobs", "temperature")
        prompt = self.prompts[0][0]
        one, other = (
            self.ask(prompt, **{**self.neutral, "max_tokens": 1, "temperature": t}, top=self.top).choices[0].top[0]
            for t in (1.0, 0.5)
        )
        shared = [(one[label], other[label]) for label in [*one][:5] if label in other]
        if not shared or max(abs(a - b) for a, b in shared) > 0.05:
            raise Difference("the logprobs of temperature 0.5 are others than those of temperature 1")
        if sum(map(math.exp, one.values())) > 1.01:
            raise Difference(f"the probabilities of a position have the sum {sum(map(math.exp, one.values())):.3f}")
        return "the logprobs are those of the model, before temperature"

    # penalties

    @cached_property
    def repeating(self) -> tuple[str, Label, TopTokens, TopTokens]:
        """A prompt that is continued with the token that it repeats; the token, and the distributions of steps 1, 3."""
        self.need("logprobs")
        if self.spelling == "stripped":
            raise NotTested("the texts of tokens have no spaces, so that they cannot be told apart")
        for prompt in REPETITIONS:
            choice = self.ask(prompt, **{**self.neutral, "max_tokens": 3, "temperature": 0}, top=self.top).choices[0]
            if len(choice.top) == 3 and len({*choice.tokens[:2]}) == 1:
                first, _, third = (TopTokens.of(each) for each in choice.top)
                token = choice.tokens[0]
                likely = [dict(zip(listed.labels, listed.p, strict=True)).get(token, 0.0) for listed in (first, third)]
                if 0.4 <= likely[0] <= 0.95 and likely[1] <= 0.95 and isinstance(token, str):
                    return prompt, token, first, third
        raise NotTested("no prompt is continued with the token that it repeats")

    def _prompt_is_not_counted(self) -> str:
        self.need("presence_penalty", "frequency_penalty")
        prompt, token, listed, _ = self.repeating
        expected = surely(listed, ())
        fields = {"presence_penalty": 1.5, "frequency_penalty": 1.5}
        try:
            return follow(self.drawer(prompt), fields, expected, {}, self.draws)
        except Difference as difference:
            raise Difference(f"the prompt counts, which repeats {token!r}. {difference}") from None

    def _amounts(self) -> str:
        self.need("presence_penalty", "frequency_penalty")
        prompt, token, _, listed = self.repeating
        fields: dict[str, Any] = {"presence_penalty": 0.4, "frequency_penalty": 0.8}
        amounts = (("no penalty", 0.0), ("each once", 1.2), ("each twice", 2.4))
        others = {name: apply(listed, (("shift", {token: amount}),)) for name, amount in amounts}

        def draw(count: int, fields: Mapping[str, Any]) -> Counter[Label]:
            more = {"max_tokens": 3} if self.spelling == "text" else {"max_tokens": 3, "top": 1}
            choices = self.service.sample(count, prompt, **{**fields, **more})
            if self.spelling == "text":
                texts = [one.text for one in choices if one.text.startswith(f"{token}{token}")]
                return Counter(text[2 * len(str(token)) :] for text in texts)
            return Counter(
                one.tokens[2] for one in choices if one.tokens[:2] == (token, token) and len(one.tokens) == 3
            )

        usable = sum(draw(128, fields).values())
        if usable * self.draws / 64 < 100:
            raise NotTested(f"only {usable} of 128 outputs begin with {token!r} twice")
        expected = surely(listed, (("shift", {token: 2.0}),))
        return f"after {token!r} twice: {follow(draw, fields, expected, others, 2 * self.draws)}"

    def _repetition_counts_prompt(self) -> str:
        self.need("repetition_penalty")
        prompt, token, listed, _ = self.repeating
        expected = surely(listed, ())
        counts = self.drawer(prompt)(256, {self.repetition: 2.0})
        if not fit(expected, counts).fails:
            raise Difference(
                f"{self.repetition} 2 does not change the probability of {token!r}, which is in the prompt"
            )
        share, p = counts[token] / 256, float(listed.p[listed.labels.index(token)])
        return (
            f"{self.repetition} 2 changes the share of {token!r}, which is in the prompt, from {p:.2f} to {share:.2f}"
        )

    # stop strings, streams and counts

    def _stop_across_tokens(self) -> str:
        self.need("stop")
        found = re.search(r"\S \S", self.greedy[2:])
        if found is None:
            raise NotTested("the greedy text has no spaces")
        early, late = found[0], stop_string(self.greedy[found.end() + 2 :] or self.greedy)
        response = self.ask(self.prompt, temperature=0, stop=[late, early])
        before = self.greedy[: self.greedy.index(early)]
        if response.text != before:
            raise Difference(f"stop {[late, early]} gives {response.text[-32:]!r} instead of {before[-32:]!r}")
        if response.choices[0].finish_reason != "stop":
            raise Difference(f"the finish reason is {response.choices[0].finish_reason!r}")
        return f"of two stop strings, the one that comes first ends the text: {early!r}, across tokens"

    def _stop_in_stream(self) -> str:
        self.need("stop")
        word = stop_string(self.greedy)
        text, reasons, _ = self.stream(self.prompt, temperature=0, stop=[word])
        before = self.greedy[: self.greedy.index(word)]
        if text != before:
            raise Difference(f"with stop {word!r}, a stream has {text[-32:]!r} instead of {before[-32:]!r}")
        if reasons != ["stop"]:
            raise Difference(f"the stream has the finish reasons {reasons}")
        return f"a stream ends before {word!r} too, and nothing of it is sent"

    def _stream(self) -> str:
        text, reasons, _ = self.stream(self.prompt, temperature=0)
        if text != self.greedy:
            raise Difference(f"a stream has {text[:48]!r}, a response without it {self.greedy[:48]!r}")
        if len(reasons) != 1:
            raise Difference(f"a stream has the finish reasons {reasons}")
        return "a stream has the same text, and one finish reason"

    def _usage(self) -> str:
        response = self.ask(self.prompt, temperature=0, max_tokens=5)
        usage, reason = response.usage, response.choices[0].finish_reason
        if reason != "length":
            raise Difference(f"max_tokens 5 gives the finish reason {reason!r} and the text {response.text!r}")
        counts = [usage.get(f"{name}_tokens") for name in ("prompt", "completion", "total")]
        if counts[1] != 5 or not counts[0] or counts[2] != counts[0] + 5:
            raise Difference(f"max_tokens 5 gives the usage {json.dumps(usage)}")
        return f"{counts[0]} prompt tokens, 5 completion tokens, {counts[2]} in total"

    def _usage_of_n(self) -> str:
        self.need("n")
        response = self.ask(self.prompt, temperature=1.0, max_tokens=4, n=3)
        if any(one.finish_reason != "length" for one in response.choices):
            raise NotTested("an output ended before max_tokens")
        if response.usage.get("completion_tokens") != 12:
            raise Difference(f"three choices of 4 tokens have the usage {json.dumps(response.usage)}")
        return "three choices of 4 tokens have 12 completion tokens"

    def _usage_of_stream(self) -> str:
        _, _, usage = self.stream(self.prompt, temperature=0, max_tokens=5, stream_options={"include_usage": True})
        if usage.get("completion_tokens") != 5:
            raise Difference(f"include_usage gives the usage {json.dumps(usage)} for 5 tokens")
        return "include_usage ends a stream with the usage"

    def _logprob_counts(self) -> str:
        self.need("logprobs")
        choice = self.ask(self.prompt, temperature=0, max_tokens=5, top=3).choices[0]
        if not len(choice.tokens) == len(choice.logprobs) == len(choice.top) == 5:
            counts = len(choice.tokens), len(choice.logprobs), len(choice.top)
            raise Difference(f"5 tokens have {counts} tokens, logprobs and lists of logprobs")
        sizes = {len(each) for each in choice.top}
        if not sizes <= {3, 4}:
            raise Difference(f"3 logprobs were requested, and the positions have {sorted(sizes)}")
        return "5 tokens have 5 positions with 3 logprobs each"

    # errors

    def _refuses(self, field: str, value: Any) -> str:
        if field not in ("temprature", "max_tokens", "seed"):
            self.need(field)
        name = self.repetition if field == "repetition_penalty" else field
        try:
            self.service.client.json(self.service.path, {**self.service.body(self.prompt, max_tokens=2), name: value})
        except RequestError as error:
            if error.status >= 500:
                raise Difference(str(error)) from None
            if name not in error.raw:
                raise Difference(f"refused, but the error does not name {name}: {error}") from None
            return f"refused with {error}"
        except ServiceError as error:
            if self.is_lost:
                raise
            self.is_lost = True
            raise Difference(f"no response: {error}") from None
        raise Difference(f"{name} {json.dumps(value)} is accepted")

    def _malformed(self) -> str:
        try:
            self.service.client.send(self.service.path, b'{"prompt": ')
        except RequestError as error:
            if error.status >= 500:
                raise Difference(str(error)) from None
            self.ask(self.prompt, max_tokens=1)
            return f"refused with status {error.status}; the next request is answered"
        raise Difference("a body that is not JSON is accepted")

    def checks(self) -> Iterator[Check]:
        """Yield all checks in their order."""
        methods: Mapping[str, Callable[[], str]] = {
            "seed": self._seed,
            "temperature": self._temperature,
            "top_k": partial(self._changes, "top_k", 1),
            "top_p": partial(self._changes, "top_p", 1e-6),
            "min_p": partial(self._changes, "min_p", 1.0),
            "logit_bias": self._logit_bias,
            "n": self._n,
            "stop": self._stop,
            "max_tokens": self._max_tokens,
            "presence_penalty": partial(self._penalty, "presence_penalty", 2.0),
            "frequency_penalty": partial(self._penalty, "frequency_penalty", 2.0),
            "repetition_penalty": partial(self._penalty, "repetition_penalty", 5.0),
        }
        neutral: Mapping[str, Sequence[Any]] = {
            **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), (1.0,)),
            **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty"), (0.0,)),
            "top_k": (0, -1),
        }
        for field, method in methods.items():
            yield self._check("fields", field, partial(self.scan, field, method, neutral.get(field)))
        yield self._check("fields", "logprobs", self._logprobs)
        for name, run in self._later():
            yield self._check(*name, run)

    def _later(self) -> Iterator[tuple[tuple[str, str], Callable[[], str]]]:
        yield ("identities", "temperature 0 repeats"), self._greedy_repeats
        for field, value in (("top_k", 1), ("top_p", 1e-6), ("min_p", 1.0)):
            yield ("identities", f"{field} {value:g} is greedy"), partial(self._is_greedy, field, value)
        yield ("identities", "no default penalties"), self._default_penalties
        yield ("identities", "seeds differ"), self._seeds_differ
        yield ("identities", "no seed"), self._no_seed
        yield ("identities", "seed among others"), self._among_others
        yield ("identities", "choices differ"), self._choices_differ
        yield ("distribution", "sampled token"), self._sampled_token
        yield ("distribution", "raw logprobs"), self._logprobs_are_raw
        yield ("distribution", "temperature 1"), partial(self._follows, ())
        for temperature in (0.6, 1.6):
            stages = (("temperature", temperature),)
            yield ("distribution", f"temperature {temperature:g}"), partial(self._follows, stages)
        for field in ("top_k", "top_p", "min_p"):
            yield ("distribution", f"{field} keeps"), partial(self._truncation, field)
        for first, second in ORDERS:
            yield ("order", f"{first}, then {second}"), partial(self._order, first, second)
        yield ("penalties", "the prompt"), self._prompt_is_not_counted
        yield ("penalties", "amounts"), self._amounts
        yield ("penalties", "repetition"), self._repetition_counts_prompt
        yield ("stop", "several stop strings"), self._stop_across_tokens
        yield ("stop", "stop in a stream"), self._stop_in_stream
        yield ("counts", "stream"), self._stream
        yield ("counts", "usage"), self._usage
        yield ("counts", "usage of n"), self._usage_of_n
        yield ("counts", "usage of a stream"), self._usage_of_stream
        yield ("counts", "number of logprobs"), self._logprob_counts
        yield ("errors", "malformed JSON"), self._malformed
        for field, value in OUT_OF_RANGE:
            yield ("errors", f"{field} {json.dumps(value)}"), partial(self._refuses, field, value)

    def _check(self, group: str, name: str, run: Callable[[], str]) -> Check:
        def guarded() -> str:
            try:
                return run()
            except RequestError as error:
                if error.status >= 500:
                    raise Difference(str(error)) from None
                raise NotTested(f"refused with {error}") from None
            except ServiceError as error:
                self.is_lost = True
                raise NotTested(str(error)) from None

        return Check(group, name, guarded)


OUT_OF_RANGE: Sequence[tuple[str, Any]] = (
    *(("temprature", 0.5), ("temperature", -1), ("top_k", -5), ("top_p", 1.5), ("min_p", 1.5), ("n", 0)),
    *(("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0), ("seed", "seven")),
    *(("max_tokens", -1), ("logit_bias", {"99999999": 1})),
)
"""Fields with values that are errors: a misspelled field, then values; the last two have ended servers."""


def check_service(service: Service, draws: int = 1280, progress: Progress = str) -> Findings:
    """Check a service. draws: per exact test, at least 1,000 for the stated power. progress: see ``Progress``."""
    start = time.perf_counter()
    checks = ServiceChecks(service, draws)
    findings = [*run_checks(checks.checks(), progress)]
    about = {
        "endpoint": service.path,
        "model": service.model or "not named",
        "requests": service.client.requests,
        "seconds": round(time.perf_counter() - start, 1),
        "draws per test": draws,
        "power": checks.power or "no exact test was made",
    }
    return Findings(service.client.url, about, findings)
