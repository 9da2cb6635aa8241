"""Translates structural tags to an expression over terminals, JSON schemas, grammars and special tokens.

A text that contains special tokens of the tokenizer stands for these tokens, or for the same characters as text. Free
text ends with the first trigger or end in it, and a section with the first end after which its content is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple, final

from nucleate.parameters.converters import shown
from nucleate.structured_output import structural_tag as tags
from nucleate.structured_output.grammar_expressions import (
    EMPTY,
    Choice,
    Expression,
    Sequence,
    TokenReference,
    choice,
    sequence,
)
from nucleate.structured_output.llguidance_library import Vocabulary
from nucleate.structured_output.pattern_syntax import with_explicit_classes
from nucleate.structured_output.structural_tag import Format, Tag, Token, TriggeredTags, reject
from nucleate.structured_output.tag_expressions import (
    ANY,
    Pattern,
    concatenation,
    either,
    first_match,
    fixed,
    free_text,
    intersection,
    join,
    literal,
    regex,
    repeat,
    text_until,
    union,
    without,
)


class FoundToken(NamedTuple):
    """A special token in a text: where it begins and ends, and its id."""

    start: int
    end: int
    token_id: int


@final
class SpecialTokens:
    """The special tokens of a vocabulary by their text. The longest one counts where several begin."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        names = vocabulary.tokenizer.pieces.tokens
        special = [token for token in vocabulary.special_ids if token in vocabulary.allowed_ids]
        self._ids = {names[token]: token for token in reversed(special) if names[token]}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def find(self, text: str, start: int = 0) -> FoundToken | None:
        """Return the first special token in a text, from a position on."""
        found = self._any.search(text, start)
        return None if found is None else FoundToken(found.start(), found.end(), self._ids[found[0]])

    def can_spell(self, text: str) -> bool:
        """Return whether other tokens can write the special tokens in a text, as characters."""
        found = self.find(text)
        while found is not None:
            if not self._spelled(text[found.start : found.end].encode()):
                return False
            found = self.find(text, found.end)
        return True

    @lru_cache(1024)  # noqa: B019  # one per model
    def _spelled(self, data: bytes) -> bool:
        reached = {0}
        for end in range(1, len(data) + 1):
            if any(data[start:end] in self._ordinary for start in reached):
                reached.add(end)
        return len(data) in reached

    @cached_property
    def _ordinary(self) -> frozenset[bytes]:
        special = frozenset(self._vocabulary.special_ids)
        return frozenset(data for token, data in enumerate(self._vocabulary.tokens) if token not in special)

    def text(self, token_id: int) -> str:
        return self._vocabulary.tokenizer.pieces.tokens[token_id]

    def is_token(self, reference: str, token_id: int) -> bool:
        """Return whether a reference of a grammar, ``<[id]>`` or ``<name>``, is a token."""
        return reference in (f"<[{token_id}]>", self.text(token_id))

    def resolve(self, token: Token) -> int | str:
        """Return the id of a special token, or the text of another token. Raises ParameterError for an unknown one."""
        vocabulary, given = self._vocabulary, token.token
        token_id = vocabulary.tokenizer.backend.token_to_id(given) if isinstance(given, str) else given
        if token_id not in vocabulary.allowed_ids:
            reject(token.at, f"{shown(given)} is not a token of this model")
        if token_id in vocabulary.special_ids:
            return token_id
        try:
            return vocabulary.tokens[token_id].decode()
        except UnicodeDecodeError:
            reject(token.at, f"{shown(given)} must be a special token, or one with a text")


class Ends(NamedTuple):
    """The ends of a tag, as texts and ids of special tokens, and their place in the document."""

    given: tuple[str | int, ...] = ()
    at: str = ""

    @property
    def texts(self) -> list[str]:
        return [end for end in self.given if isinstance(end, str)]


NO_ENDS = Ends()


@final
class TagCompiler:
    """Translates formats. embedded: the expression of each JSON schema and grammar, by its place."""

    def __init__(self, tokens: SpecialTokens, embedded: Mapping[str, Expression]) -> None:
        self._tokens, self._embedded = tokens, embedded

    def expression(self, form: Format, ends: Ends = NO_ENDS, *, last: bool = True) -> Expression:
        """Return the expression of a format. ends: those of the tag around it, included if it is the last part."""
        match form:
            case TriggeredTags():
                return self._triggered(form, ends, last=last)
            case tags.Sequence(elements=elements):
                return join(self.expression(part, ends, last=last and part is elements[-1]) for part in elements)
            case tags.Or(elements=elements):
                return either(self.expression(part, ends, last=last) for part in elements)
            case tags.Repeat(content=content, low=low, high=high):
                found = repeat(self.expression(content, ends, last=False), low, high)
            case Tag(ends=("",)):
                begin = self._marker(self._marker_text(form.begin), form.at)
                return join([begin, self.expression(form.content, ends, last=last)])
            case Tag():
                found = join([self._marker(self._marker_text(form.begin), form.at), self._after_begin(form)])
            case tags.TagsWithSeparator():
                found = self._separated(form)
            case _:
                found = self._leaf(form, ends)
        return self._closed(found, ends if last else NO_ENDS)

    def _leaf(self, form: Format, ends: Ends) -> Expression:
        match form:
            case tags.AnyText(excludes=excludes):
                return free_text(checked_stops([*ends.texts, *excludes], form.at), form.at)
            case tags.ConstString(value=value):
                return self.text(value, form.at)
            case tags.Regex(pattern=pattern):
                return regex(with_explicit_classes(pattern), form.at)
            case Token():
                return self._marker(self._marker_text(form), form.at)
        return self._embedded[form.at]

    def _after_begin(self, tag: Tag) -> Expression:
        ends = () if tag.ends == ("",) else tuple(dict.fromkeys(map(self._marker_text, tag.ends)))
        texts = sorted(end for end in ends if isinstance(end, str))
        for shorter, longer in pairwise(texts):
            if longer.startswith(shorter):
                reject(f"{tag.at}.end", f"{shown(longer)} is never reached, because {shown(shorter)} ends the tag")
        return self.expression(tag.content, Ends(ends, f"{tag.at}.end"))

    def _separated(self, form: tags.TagsWithSeparator) -> Expression:
        tag = either(self.expression(tag) for tag in form.tags)
        more = repeat(join([self.text(form.separator, f"{form.at}.separator"), tag]), 0, None)
        found = tag if form.stop_after_first else join([tag, more])
        return found if form.at_least_one else either([EMPTY, found])

    def _triggered(self, form: TriggeredTags, ends: Ends, *, last: bool) -> Expression:
        """Free text up to each trigger and its tags, and free text at the end."""
        close = ends if last else NO_ENDS
        triggers = {self._marker_text(trigger): index for index, trigger in reversed([*enumerate(form.triggers)])}
        texts = [trigger for trigger in triggers if isinstance(trigger, str)]
        stops = checked_stops([*texts, *ends.texts, *form.excludes], form.at)
        rests: dict[FreeTextEnd, list[Expression]] = {}
        for tag in form.tags:
            begin, rest = self._marker_text(tag.begin), self._after_begin(tag)
            found = [trigger for trigger in triggers if trigger == begin or _starts_with(begin, trigger)]
            if not found:
                reject(f"{tag.at}.begin", f"{shown(tag.begin)} begins with none of the triggers")
            for ending, position in self.endings(begin, found[0]):
                after = self.text(begin, f"{tag.at}.begin", position) if isinstance(begin, str) else EMPTY
                rests.setdefault(ending, []).append(join([after, rest]))
            triggers[found[0]] = -1
        for trigger, index in triggers.items():
            if index >= 0:
                reject(f"{form.at}.triggers[{index}]", f"no tag begins with {shown(trigger)}")
        starts = choice(
            sequence([self.up_to(ending, stops, form.at), either(after)]) for ending, after in rests.items()
        )
        tail = self._closed(free_text(stops, form.at), close)
        first = either(self.expression(tag) for tag in form.tags)
        if form.stop_after_first:
            closed = self._closed(EMPTY, close)
            return join([first, closed]) if form.at_least_one else choice([sequence([starts, closed]), tail])
        loop = sequence([repeat(starts, 0, None), tail])
        return sequence([first, loop]) if form.at_least_one else loop

    def _closed(self, content: Expression, ends: Ends) -> Expression:
        """Return a content that one of the ends follows, the first one after which it is complete."""
        if not ends.given:
            return content
        if isinstance(content, Choice):
            return choice(self._closed(part, ends) for part in content.parts)
        if isinstance(content, Sequence) and content.parts:
            return join([*content.parts[:-1], self._closed(content.parts[-1], ends)])
        if not isinstance(content, Pattern) or (content.stops is not None and not content.stops.issuperset(ends.texts)):
            return join([content, either(self._marker(end, ends.at) for end in ends.given)])
        found: list[Expression] = []
        before = content
        texts = [fixed(text, ends.at) for text in ends.texts if self._tokens.can_spell(text)]
        if content.stops is None and texts:
            closed = concatenation([content, union(texts)])
            before = without(content, concatenation([closed, ANY]))
            found.append(first_match(closed))
        for end in ends.given:
            for ending, position in self.endings(end, end):
                after = self.text(end, ends.at, position) if isinstance(end, str) else EMPTY
                if ending.token_id is not None and content.stops is None:
                    found.append(join([before, literal(ending.text, ends.at), _reference(ending.token_id), after]))
                elif content.stops is not None:
                    found.append(join([self.up_to(ending, content.stops, content.at), after]))
        return choice(found)

    def endings(self, text: str | int, trigger: str | int) -> Iterator[tuple[FreeTextEnd, int]]:
        """Yield how free text may end with the trigger of a text or token, and where the rest of the text begins."""
        if isinstance(text, int) or isinstance(trigger, int):
            yield FreeTextEnd("", int(trigger)), 0
            return
        token = self._tokens.find(text)
        if token is None or token.start >= len(trigger) or self._tokens.can_spell(text):
            yield FreeTextEnd(trigger), len(trigger)
        if token is not None and token.start < len(trigger):
            yield FreeTextEnd(text[: token.start], token.token_id), token.end

    def up_to(self, ending: FreeTextEnd, stops: frozenset[str], at: str) -> Expression:
        """Return the free text up to and including an ending."""
        if ending.token_id is None:
            return text_until(ending.text, stops, at)
        return sequence([_ending_with(free_text(stops, at), ending.text), _reference(ending.token_id)])

    def text(self, text: str, at: str, start: int = 0) -> Expression:
        """Return the expression of a text from a position on, with its special tokens."""
        parts: list[Expression] = []
        while (token := self._tokens.find(text, start)) is not None:
            name, spellings = text[token.start : token.end], [_reference(token.token_id)]
            if self._tokens.can_spell(name):
                spellings.append(literal(name, at))
            parts += [literal(text[start : token.start], at), choice(spellings)]
            start = token.end
        return join([*parts, literal(text[start:], at)])

    def _marker_text(self, marker: str | Token) -> str | int:
        """Return a begin, an end or a trigger as a text, or as the id of a special token."""
        return self._tokens.resolve(marker) if isinstance(marker, Token) else marker

    def _marker(self, marker: str | int, at: str) -> Expression:
        return self.text(marker, at) if isinstance(marker, str) else _reference(marker)


class FreeTextEnd(NamedTuple):
    """How free text ends: with a text, and then a special token."""

    text: str
    token_id: int | None = None


def checked_stops(texts: Iterable[str], at: str) -> frozenset[str]:
    """Return the texts at which free text ends. Raises ParameterError if one hides another."""
    stops = frozenset(texts)
    for stop in stops:
        for other in stops:
            if stop != other and stop in other:
                reject(at, f"{shown(other)} is never reached, because free text already ends at {shown(stop)}")
    return stops


def _starts_with(begin: str | int, trigger: str | int) -> bool:
    return isinstance(begin, str) and isinstance(trigger, str) and begin.startswith(trigger)


def _ending_with(pattern: Pattern, text: str) -> Pattern:
    return intersection(pattern, concatenation([ANY, fixed(text)])) if text else pattern


def _reference(token_id: int) -> Expression:
    return TokenReference(f"<[{token_id}]>")
