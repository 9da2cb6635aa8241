"""Translates structural tags to an expression over terminals, JSON schemas, grammars and special tokens.

A text that contains special tokens of the tokenizer stands for these tokens, or for the same characters as text. Free
text ends with the first trigger or end in it, and a section with the first end after which its content is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, pairwise, takewhile
from typing import Final, NamedTuple, final

from nucleate.parameters.converters import shown
from nucleate.structured_output import structural_tag as tags
from nucleate.structured_output.grammar_expressions import (
    EMPTY,
    Choice,
    Expression,
    Repetition,
    Sequence,
    TokenReference,
    choice,
    repetition,
    sequence,
)
from nucleate.structured_output.llguidance_library import SpecialTokens
from nucleate.structured_output.pattern_syntax import with_explicit_classes
from nucleate.structured_output.structural_tag import Format, Tag, Token, TriggeredTags, reject

_NUMBERS = count()
_RAW = re.compile(r"\\.|/|[\n\r]", re.DOTALL)
_ESCAPED: Final = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}
ANY_CHARACTERS: Final = frozenset(map(chr, range(128))) | {"é"}
"""All ASCII characters, and one that stands for all others."""


@dataclass(frozen=True, eq=False)
class Pattern(Expression):
    """A terminal. ``body``: its definition in Lark, with the names of the terminals that it ``uses``.

    ``prefix``: a text with which all its texts begin. ``literal``: ``prefix`` is its only text. ``stops``: the texts at
    which free text ends; ``until``: that with which it does. ``at``: its place in the document.
    ``ends_itself``: no text of it begins with another one.
    """

    body: str
    uses: tuple[Pattern, ...] = ()
    prefix: str = ""
    literal: bool = False
    stops: frozenset[str] | None = None
    until: str | None = None
    at: str = ""
    ends_itself: bool = False
    number: int = field(default_factory=lambda: next(_NUMBERS))
    parts = ()

    @property
    def name(self) -> str:
        return self.body if self.literal else f"T_{self.number}"

    def definitions(self, known: dict[str, str]) -> None:
        """Add the definitions of the terminal, and of those that it uses."""
        if not self.literal and self.name not in known:
            known[self.name] = self.body
            for pattern in self.uses:
                pattern.definitions(known)

    @property
    def first(self) -> frozenset[str]:
        """The characters with which it may begin, as in ``ANY_CHARACTERS``."""
        return frozenset(ascii_or_other(self.prefix[0])) if self.prefix else ANY_CHARACTERS


@dataclass(frozen=True, eq=False)
class Embedded(Expression):
    """A JSON schema (``%json``) or a grammar (``@name``) as ``text`` of a rule.

    ``first``: the characters with which it may begin. ``continues``: those that may follow a complete text within it.
    """

    text: str
    first: frozenset[str]
    continues: frozenset[str]
    at: str
    is_json: bool = False
    parts = ()


def ascii_or_other(characters: Iterable[str]) -> Iterator[str]:
    for character in characters:
        yield character if character.isascii() else "é"


def fixed(text: str, at: str = "") -> Pattern:
    """Return the terminal of one text that is not empty."""
    # ASCII, because Lark strings cannot contain control characters.
    return Pattern(json.dumps(text), prefix=text, literal=True, at=at, ends_itself=True)


def literal(text: str, at: str) -> Expression:
    return fixed(text, at) if text else EMPTY


def regex(pattern: str, at: str) -> Pattern:
    """Return the terminal of a regular expression in Rust's syntax."""
    escaped = _RAW.sub(lambda found: _ESCAPED.get(found[0], found[0]), pattern)
    return Pattern(f"/(?:{escaped})/", at=at)


ANY: Final = Pattern("/(?s:.*)/")
SOME: Final = Pattern("/(?s:.+)/")


def concatenation(patterns: Iterable[Pattern]) -> Pattern:
    parts = tuple(patterns)
    if len(parts) == 1:
        return parts[0]
    prefix = ""
    for part in parts:
        prefix += part.prefix
        if not part.literal:
            break
    else:
        return fixed(prefix, parts[0].at)
    ends = all(part.ends_itself for part in parts)
    return Pattern(" ".join(part.name for part in parts), parts, prefix, at=parts[0].at, ends_itself=ends)


def union(patterns: Iterable[Pattern]) -> Pattern:
    parts = tuple({pattern.name: pattern for pattern in patterns}.values())
    if len(parts) == 1:
        return parts[0]
    same = takewhile(lambda letters: len({*letters}) == 1, zip(*(part.prefix for part in parts), strict=False))
    prefix = "".join(letters[0] for letters in same)
    return Pattern(" | ".join(part.name for part in parts), parts, prefix, at=parts[0].at)


def without(pattern: Pattern, excluded: Pattern) -> Pattern:
    return Pattern(f"{pattern.name} & ~{excluded.name}", (pattern, excluded), pattern.prefix, at=pattern.at)


def intersection(pattern: Pattern, other: Pattern) -> Pattern:
    return Pattern(f"{pattern.name} & {other.name}", (pattern, other), pattern.prefix, at=pattern.at)


def first_match(pattern: Pattern) -> Pattern:
    """Return the texts of a terminal that have no shorter text of it at their beginning."""
    return replace(without(pattern, concatenation([pattern, SOME])), ends_itself=True)


def free_text(stops: frozenset[str], at: str) -> Pattern:
    """Return the texts that contain none of ``stops``."""
    if not stops:
        return Pattern(ANY.body, stops=stops, at=at)
    found = without(ANY, concatenation([ANY, _union_of(stops), ANY]))
    return Pattern(found.body, found.uses, stops=stops, at=at)


def text_until(stop: str, stops: frozenset[str], at: str) -> Pattern:
    """Return the texts that contain one of ``stops`` at their end only, namely ``stop``."""
    ending = concatenation([ANY, _union_of([stop])])
    found = without(ending, concatenation([ANY, _union_of(stops), SOME]))
    return Pattern(found.body, found.uses, stops=stops, until=stop, at=at, ends_itself=True)


def _union_of(texts: Iterable[str]) -> Pattern:
    return union(map(fixed, sorted(texts)))


def join(parts: Iterable[Expression]) -> Expression:
    """Return a sequence in which adjacent terminals are one.

    Free text stays apart: joined with another text, it could contain one of its stops.
    """
    flat: list[Expression] = []
    for part in parts:
        for inner in part.parts if isinstance(part, Sequence) else (part,):
            before = flat[-1] if flat else None
            if isinstance(before, Pattern) and isinstance(inner, Pattern) and before.stops is inner.stops is None:
                flat[-1] = concatenation([before, inner])
            else:
                flat.append(inner)
    return sequence(flat)


def either(parts: Iterable[Expression]) -> Expression:
    """Return a choice in which all terminals but free text are one."""
    patterns: list[Pattern] = []
    others: list[Expression] = []
    for part in parts:
        if isinstance(part, Pattern) and part.stops is None:
            patterns.append(part)
        else:
            others.append(part)
    return choice([*([union(patterns)] if patterns else []), *others])


def repeat(part: Expression, low: int, high: int | None) -> Expression:
    """Return a repetition. Repeated free text is free text."""
    if isinstance(part, Pattern) and part.stops is not None and part.until is None:
        return part
    repeated = repetition(part, low, high)
    if not isinstance(part, Pattern) or part.stops is not None or not isinstance(repeated, Repetition):
        return repeated
    return Pattern(f"{part.name}{repeated.operator}", (part,), part.prefix if low else "", at=part.at)


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
            found = [each for each in texts if begin.startswith(each)] if isinstance(begin, str) else [begin]
            if not found or found[0] not in triggers:
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
        text = free_text(stops, at)
        if ending.text:
            text = intersection(text, concatenation([ANY, fixed(ending.text)]))
        return sequence([text, _reference(ending.token_id)])

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


def _reference(token_id: int) -> Expression:
    return TokenReference(f"<[{token_id}]>")
