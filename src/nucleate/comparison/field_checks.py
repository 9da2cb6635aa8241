"""The first checks of a service: which fields change anything, and identities that need no reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from nucleate.comparison.exact_tests import (
    Difference,
    NotTested,
)
from nucleate.comparison.service_client import TOKENS, Choice, RequestError, Service

PROMPTS = (
    *("Once upon a time there was a", "The little dog found a", "One day, a girl named", "In the morning the sea was"),
    *("She opened the box and saw a", "The boy wanted to", "My favorite animal is the", "They went to the park to"),
)
REPETITIONS = tuple(" ".join([word] * 24) for word in ("ha", "tick", "again", "round", "ho", "good", "the", "go"))

LEAST_MARGIN = 0.2
"""Between the logprobs of the best two tokens, in a greedy text that other requests are compared with."""

OTHER_NAME = ": the name here"


class FieldChecks:
    """What these checks have learned about one service. draws: per exact test."""

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


def stop_string(text: str) -> str:
    """Return a part of a text that can end it: three letters of a word after the beginning. Raises NotTested."""
    for found in re.finditer(r"[A-Za-z]{3}", text):
        if found.start() >= 6 and text.index(found[0]) == found.start():
            return found[0]
    raise NotTested(f"the greedy text has no word: {text[:40]!r}")
