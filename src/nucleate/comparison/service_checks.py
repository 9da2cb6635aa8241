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
from nucleate.comparison.service_client import TOKENS, Choice, RequestError, Service, ServiceError

PROMPTS = (
    *("Once upon a time there was a", "The little dog found a", "One day, a girl named", "In the morning the sea was"),
    *("She opened the box and saw a", "The boy wanted to", "My favorite animal is the", "They went to the park to"),
)
REPETITIONS = tuple(" ".join([word] * 24) for word in ("ha", "tick", "again", "round", "ho", "good", "the", "go"))

LEAST_MARGIN = 0.2
"""Between the logprobs of the best two tokens, in a greedy text that other requests are compared with."""

OTHER_NAME = ": the name here"


class ServiceChecks:
    """The checks of one service, with what they have learned about it so far. draws: per exact test."""

    def __init__(self, service: Service, draws: int = 1280) -> None:
        self.service, self.draws = service, draws
        self.ask, self.stream, self.neutral = service.ask, service.stream, service.neutral
        self.works: dict[str, str] = {}
        """Why a field cannot be used in later checks, by name; "" if it can."""
        self.repetition, self.top, self.power = "repetition_penalty", 0, ""
        self.is_lost = False
        """Whether a request had no response."""

    def hot(self, **fields: Any) -> list[str]:
        """Return the texts of three seeds at temperature 2."""
        made = [{"temperature": 2.0, **self.seeded(seed), **fields} for seed in (11, 12, 13)]
        return [self.ask(self.prompt, **one).text for one in made]

    def seeded(self, seed: int) -> dict[str, Any]:
        """Return the field of a seed; nothing if the service refuses it."""
        return {} if self.works.get("seed", "").startswith("refused") else {"seed": seed}

    @cached_property
    def prompt(self) -> str:
        """A prompt whose greedy text has no near ties, which rounding could decide, as far as logprobs show."""
        margins = {}
        for prompt in PROMPTS:
            try:
                [choice, *_] = self.ask(prompt, temperature=0, top=2).choices
            except RequestError:
                break
            pairs = [sorted(top.values())[-2:] for top in choice.top if len(top) > 1]
            if not pairs:
                break
            margins[prompt] = min(high - low for low, high in pairs)
            if margins[prompt] >= LEAST_MARGIN:
                return prompt
        return max(margins, key=margins.__getitem__, default=PROMPTS[0])

    @cached_property
    def greedy_twice(self) -> tuple[str, str]:
        """Two texts at temperature 0."""
        return (
            self.ask(self.prompt, temperature=0).text,
            self.ask(self.prompt, temperature=0, **self.seeded(5)).text,
        )

    @property
    def greedy(self) -> str:
        """The text at temperature 0. Raises NotTested if there is none."""
        one, other = self.greedy_twice
        if one != other:
            raise NotTested("temperature 0 does not repeat a text")
        return one

    @cached_property
    def usual_hot(self) -> list[str]:
        return self.hot()

    def need(self, *fields: str) -> None:
        """Raise NotTested if one of these fields has no effect."""
        for field in fields:
            if why := self.works.get(field, "it was not tested"):
                raise NotTested(f"{field}: {why}")

    # which fields change anything

    def scan(self, field: str, check: Callable[[], str], neutral: Any = None) -> str:
        """Run the check of a field, and note whether later checks can use it. neutral: the value that turns it off."""
        self.works[field] = "it was not tested"
        try:
            found = check()
        except Difference:
            self.works[field] = "it has no effect (see the fields)"
            raise
        except RequestError as error:
            if error.status >= 500:
                raise
            self.works[field] = f"refused with {error}"
            raise NotTested(f"not supported: refused with {error}") from None
        self.works[field] = ""
        self.service.has_seed |= field == "seed"
        if neutral is not None:
            self._use_neutral(field, neutral)
        if found.endswith(OTHER_NAME):
            raise Difference(f"{field} changes nothing: accepted and ignored. {found}")
        return found

    def _use_neutral(self, field: str, values: Sequence[Any]) -> None:
        for value in values:
            try:
                self.ask(self.prompt, max_tokens=1, **{field: value})
            except RequestError:
                continue
            self.neutral[self.repetition if field == "repetition_penalty" else field] = value
            return

    def _seed(self) -> str:
        again = self.hot()
        if again == self.usual_hot and len({*again}) == 1:
            raise Difference("three seeds give one text at temperature 2")
        if again != self.usual_hot:
            raise Difference("the same seed gives another text at temperature 2 the second time")
        return "the same seed repeats a text at temperature 2, others give other texts"

    def _temperature(self) -> str:
        if {*self.usual_hot} == {self.greedy_twice[0]} or self.hot(temperature=0) == self.usual_hot:
            raise Difference("temperature 0 and 2 give the same texts")
        return "texts at temperature 2 differ from that of temperature 0"

    def _changes(self, field: str, value: Any) -> str:
        """Whether a field has an effect on three texts at temperature 2."""
        texts = self.hot(**{field: value})
        if {*texts} == {self.greedy}:
            return f"{field} {value:g} at temperature 2 gives the greedy text"
        if texts == self.usual_hot or self.works.get("seed"):
            raise Difference(f"{field} {value:g} changes nothing: accepted and ignored")
        return f"{field} {value:g} changes the text at temperature 2"

    def _logit_bias(self) -> str:
        text = self.ask(self.prompt, temperature=0, logit_bias={"1000": 100}).text
        if text == self.greedy:
            raise Difference("a bias of 100 for one token changes nothing: accepted and ignored")
        return f"a bias of 100 for token 1000 makes the output {text[:24]!r}"

    def _n(self) -> str:
        count = len(self.ask(self.prompt, temperature=2.0, n=3).choices)
        if count != 3:
            raise Difference(f"n 3 gives {count} choice{'s' if count > 1 else ''}")
        for size in (128, 64, 32, 16, 8, 4, 3):
            try:
                if len(self.ask(self.prompt, max_tokens=1, n=size).choices) == size:
                    self.service.num_choices = size
                    break
            except RequestError:
                continue
        return f"n 3 gives three choices; up to {self.service.num_choices} were requested"

    def _stop(self) -> str:
        word = stop_string(self.greedy)
        text = self.ask(self.prompt, temperature=0, stop=[word]).text
        before = self.greedy[: self.greedy.index(word)]
        if text == self.greedy:
            raise Difference(f"stop {word!r} changes nothing: accepted and ignored")
        if text != before:
            kept = " keeps the stop string in the text" if word in text else ""
            raise Difference(f"stop {word!r}{kept}: {text[-24:]!r}, where the text before it ends {before[-16:]!r}")
        return f"the text ends before {word!r}"

    def _max_tokens(self) -> str:
        short = self.ask(self.prompt, temperature=0, max_tokens=3).text
        if short == self.greedy or not self.greedy.startswith(short):
            raise Difference(f"max_tokens 3 gives {short[:40]!r}, max_tokens {TOKENS} {self.greedy[:40]!r}")
        return "max_tokens 3 gives the beginning of the text"

    def _penalty(self, field: str, value: float) -> str:
        names = (field, "repeat_penalty") if field == "repetition_penalty" else (field,)
        refused: RequestError | None = None
        usual = self._with_penalty({})
        for name in names:
            try:
                texts = self._with_penalty({name: value})
            except RequestError as error:
                if error.status >= 500:
                    raise
                refused = refused or error
                continue
            if texts != usual:
                self.repetition = name if field == "repetition_penalty" else self.repetition
                return f"{name} {value:g} changes texts{'' if name == field or refused else OTHER_NAME}"
        if refused is not None:
            raise refused
        raise Difference(f"{field} {value:g} changes nothing in {len(usual)} texts: accepted and ignored")

    def _with_penalty(self, fields: Mapping[str, Any]) -> list[str]:
        """Return texts that repeat tokens: two greedy ones and, if seeds have an effect, two of temperature 1."""
        made: list[dict[str, Any]] = [{"temperature": 0, "prompt": self.prompt}]
        made += [{"temperature": 0, "prompt": REPETITIONS[0]}]
        if self.service.has_seed:
            made += [{"temperature": 1.0, "seed": 11, "prompt": prompt} for prompt in (REPETITIONS[0], self.prompt)]
        return [self.ask(**one, max_tokens=40, **fields).text for one in made]

    def _logprobs(self) -> str:
        self.works["logprobs"] = "there are none"
        for top in (20, 10, 5):
            try:
                choice = self.ask(self.prompt, max_tokens=1, temperature=0, top=top).choices[0]
            except RequestError as error:
                if top > 5:
                    continue
                raise NotTested(f"not supported: refused with {error}") from None
            if not choice.top or len(choice.top[0]) < 2:
                if top == 20 and not choice.top:
                    raise Difference("the response has no logprobs: accepted and ignored")
                continue
            self.works["logprobs"] = ""
            self.top = top
            return f"a position has {len(choice.top[0])} of {top} requested logprobs"
        raise Difference("a position has logprobs of its own token only")

    # identities

    def _is_greedy(self, field: str, value: float) -> str:
        self.need(field)
        for text in self.hot(**{field: value}):
            if text != self.greedy:
                raise Difference(f"{field} {value:g} at temperature 2 gives {text[:48]!r}, greedy {self.greedy[:48]!r}")
        return f"three seeds at temperature 2 with {field} {value:g} give the text of temperature 0"

    def _greedy_repeats(self) -> str:
        one, other = self.greedy_twice
        if other != one:
            raise Difference(f"temperature 0 gives {one[:40]!r}, then {other[:40]!r}")
        return "temperature 0 gives the same text twice, also with another seed"

    def _default_penalties(self) -> str:
        names = [name for name in self.neutral if name.endswith("_penalty") and self.greedy]
        for prompt in (self.prompt, *REPETITIONS[:2]):
            usual = self.ask(prompt, temperature=0, max_tokens=48)
            off = self.ask(prompt, temperature=0, max_tokens=48, **{name: self.neutral[name] for name in names})
            if usual.text != off.text:
                at = next(i for i in range(len(usual.text) + 1) if usual.text[: i + 1] != off.text[: i + 1])
                raise Difference(
                    f"with {', '.join(names)} at their neutral values the greedy text is another one: "
                    f"{off.text[max(0, at - 12) : at + 12]!r} instead of {usual.text[max(0, at - 12) : at + 12]!r}"
                )
        if self.works.get("logprobs") or self.names_other_tokens:
            return f"the greedy text is the same with {', '.join(names) or 'nothing else'} at neutral values"
        choice = self.ask(REPETITIONS[0], temperature=0, max_tokens=12, top=self.top).choices[0]
        for position, (token, top) in enumerate(zip(choice.tokens, choice.top, strict=False)):
            if top and token in top and top[token] < max(top.values()) - 1e-3:
                best = max(top, key=lambda each: top[each])
                raise Difference(
                    f"greedy selects {token!r} at position {position}, but its own logprobs rank {best!r} first"
                )
        return "the greedy token has rank 1 in its own logprobs, and neutral penalties change nothing"

    def _seeds_differ(self) -> str:
        self.need("seed")
        if len({*self.usual_hot}) == 1:
            raise Difference("three seeds give one text at temperature 2")
        return f"three seeds give {len({*self.usual_hot})} texts at temperature 2"

    def _no_seed(self) -> str:
        texts = {self.ask(self.prompt, temperature=2.0).text for _ in range(3)}
        if len(texts) == 1:
            raise Difference("three requests without a seed give the same text at temperature 2")
        return "requests without a seed give different texts"

    def _among_others(self) -> str:
        self.need("seed")
        calls = [partial(self.ask, prompt, temperature=1.0, seed=11) for prompt in (self.prompt, *PROMPTS[1:])]
        alone = calls[0]().text
        together = self.service.together(calls)[0].text
        if together != alone:
            raise Difference(f"among 7 other requests, a seed gives {together[:40]!r}, alone {alone[:40]!r}")
        return "a seed gives the same text alone and among 7 other requests"

    def _choices_differ(self) -> str:
        self.need("n")
        seeds: dict[str, Any] = {} if self.works.get("seed") else {"seed": 7}
        texts = {one.text for one in self.ask(self.prompt, temperature=2.0, n=3, **seeds).choices}
        if len(texts) == 1:
            self.service.num_choices = 1
            raise Difference("the three choices of n 3 are the same text at temperature 2")
        return f"the three choices of n 3 are {len(texts)} texts"

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

    @cached_property
    def greedy_tokens(self) -> list[Choice]:
        """Greedy tokens with logprobs."""
        self.need("logprobs")
        found = [self.ask(prompt, max_tokens=1, temperature=0, top=self.top).choices[0] for prompt in PROMPTS[:3]]
        return [one for one in found if one.top and len(one.top[0]) > 1]

    @cached_property
    def spelling(self) -> str:
        """How the text of a token is its name in the logprobs: "text", "stripped", or "tokens" if it is not."""
        pairs = [(str(max(one.top[0], key=one.top[0].__getitem__)), one.text) for one in self.greedy_tokens]
        if all(name == text for name, text in pairs):
            return "text"
        return "stripped" if all(name.strip() == text.strip() for name, text in pairs) else "tokens"

    @cached_property
    def names_other_tokens(self) -> str:
        """How the logprobs of a greedy token differ from those of the most likely one; "" if they do not."""
        for one in self.greedy_tokens:
            top = one.top[0]
            best = max(top, key=top.__getitem__)
            if one.tokens[0] != best and top.get(one.tokens[0], best) != top[best] and self.spelling != "tokens":
                return f"the text is {one.text!r}, and its logprobs name {one.tokens[0]!r}"
        return ""

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


def stop_string(text: str) -> str:
    """Return a part of a text that can end it: three letters of a word after the beginning. Raises NotTested."""
    for found in re.finditer(r"[A-Za-z]{3}", text):
        if found.start() >= 6 and text.index(found[0]) == found.start():
            return found[0]
    raise NotTested(f"the greedy text has no word: {text[:40]!r}")


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
