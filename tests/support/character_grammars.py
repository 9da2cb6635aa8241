"""Random context-free grammars over characters as GBNF texts, and a slow recogniser of their texts.

The recogniser is an Earley parser over single characters. It never reads the GBNF text: both come from one description.

A description is a tuple: ("text", "abc"), ("class", "abc", negated), ("any",), ("rule", name), ("all", parts),
("one", parts) or ("repeat", part, low, high).
"""

from __future__ import annotations

import random
from typing import Any

Description = tuple[Any, ...]
Symbol = str | frozenset[str]
Production = tuple[Symbol, ...]
Item = tuple[str, Production, int, int]

ALPHABET = 'ab-]" éè'
"""The characters of the grammars; two of them share their first byte. Texts also have ``OTHERS``."""
OTHERS = "z\n"
NAMES = ("root", "one", "two-2", "Three_3")


def random_grammar(rng: random.Random, names: int) -> dict[str, Description]:
    """Describe a grammar of this many rules. They may be recursive, ambiguous, or without a finite text."""
    return {name: _alternatives(rng, names, 3) for name in NAMES[:names]}


def _alternatives(rng: random.Random, names: int, depth: int) -> Description:
    return "one", tuple(_sequence(rng, names, depth) for _ in range(rng.choice((1, 1, 2, 3))))


def _sequence(rng: random.Random, names: int, depth: int) -> Description:
    return "all", tuple(_part(rng, names, depth) for _ in range(rng.choice((0, 1, 2, 2, 3))))


def _part(rng: random.Random, names: int, depth: int) -> Description:
    kind = rng.choice(("text", "text", "class", "any", "rule", "rule", "one", "repeat", "repeat"))
    if depth == 0 and kind in ("one", "repeat"):
        kind = "text"
    if kind == "text":
        return "text", "".join(rng.choice(ALPHABET) for _ in range(rng.choice((0, 1, 1, 1, 2, 3))))
    if kind == "class":
        return "class", "".join(rng.sample(ALPHABET, rng.choice((1, 2, 3)))), rng.random() < 0.3
    if kind == "any":
        return ("any",) if rng.random() < 0.3 else ("text", rng.choice(ALPHABET))
    if kind == "rule":
        return "rule", rng.choice(NAMES[:names])
    if kind == "one":
        return _alternatives(rng, names, depth - 1)
    low = rng.choice((0, 0, 1, 2))
    high = rng.choice((None, None, 1, 2, 3, 5))
    return "repeat", _part(rng, names, depth - 1), low, None if high is None else max(low, high)


def gbnf_text(rules: dict[str, Description]) -> str:
    return "\n".join(f"{name} ::= {_written(body, top=True)} # a rule" for name, body in rules.items())


def _written(description: Description, top: bool = False) -> str:
    kind, *values = description
    if kind == "text":
        return '"' + "".join(_escaped(letter) for letter in values[0]) + '"'
    if kind == "class":
        return f"[{'^' if values[1] else ''}{''.join(_escaped(letter) for letter in values[0])}]"
    if kind == "any":
        return "."
    if kind == "rule":
        return str(values[0])
    if kind == "repeat":
        low, high = values[1:]
        operator = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
        count = f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}"
        return f"{_written(values[0])}{operator or count}"
    separator = " | " if kind == "one" else " "
    inner = separator.join(_written(part) for part in values[0])
    return inner if top else f"({inner})"


def _escaped(letter: str) -> str:
    return {"-": r"\-", "]": r"\]", '"': r"\x22", "é": r"\u00e9"}.get(letter, letter)


class Recogniser:
    """Recognises the texts of a described grammar, one character at a time."""

    def __init__(self, rules: dict[str, Description]) -> None:
        self._productions: dict[str, list[Production]] = {}
        self._letters = frozenset(ALPHABET + OTHERS)
        for name, body in rules.items():
            self._productions[name] = [self._symbols(body)]
        productive: set[str] = set()
        while True:
            more = {
                name
                for name, productions in self._productions.items()
                if any(self._is_in(production, productive) for production in productions)
            }
            if more == productive:
                break
            productive = more
        self._productions = {
            name: [production for production in productions if self._is_in(production, productive)]
            for name, productions in self._productions.items()
            if name in productive
        }
        self.finite = "root" in productive
        self._waiting: list[dict[str, list[Item]]] = []
        self._columns = [self._closed(0, [("", ("root",), 0, 0)])] if self.finite else []
        self.text = ""

    @staticmethod
    def _is_in(production: Production, productive: set[str]) -> bool:
        return all(symbol in productive if isinstance(symbol, str) else symbol for symbol in production)

    def _symbols(self, description: Description) -> Production:
        kind, *values = description
        if kind == "text":
            return tuple(frozenset(letter) for letter in values[0])
        if kind == "class":
            return (self._letters - frozenset(values[0]) if values[1] else frozenset(values[0]),)
        if kind == "any":
            return (self._letters,)
        if kind == "rule":
            return (values[0],)
        if kind == "all":
            return tuple(symbol for part in values[0] for symbol in self._symbols(part))
        name = f"rule {len(self._productions)}"
        self._productions[name] = []
        if kind == "one":
            self._productions[name] = [self._symbols(part) for part in values[0]]
            return (name,)
        part, low, high = values
        once = self._symbols(part)
        if high is None:
            self._productions[name] = [(), (*once, name)]
            return once * low + (name,)
        self._productions[name] = [once * count for count in range(low, high + 1)]
        return (name,)

    def _closed(self, position: int, items: list[Item]) -> set[Item]:
        """Return a column: the items, with all that they predict and complete."""
        column: set[Item] = set()
        waiting: dict[str, list[Item]] = {}  # items of this column before a rule
        empty: set[str] = set()  # rules that match the empty text here
        del self._waiting[position:]
        self._waiting.append(waiting)
        while items:
            item = items.pop()
            if item in column:
                continue
            column.add(item)
            name, production, dot, origin = item
            if dot == len(production):
                if origin == position:
                    empty.add(name)
                items += [_advanced(user) for user in self._waiting[origin].get(name, ())]
                continue
            symbol = production[dot]
            if isinstance(symbol, str):
                items += [(symbol, body, 0, position) for body in self._productions[symbol]]
                waiting.setdefault(symbol, []).append(item)
                if symbol in empty:
                    items.append(_advanced(item))
        return column

    def next_letters(self) -> set[str]:
        """Return the characters that can come next."""
        found: set[str] = set()
        for _, production, dot, _ in self._columns[-1]:
            if dot < len(production) and not isinstance(production[dot], str):
                found |= production[dot]
        return found

    @property
    def complete(self) -> bool:
        return ("", ("root",), 1, 0) in self._columns[-1]

    def read(self, letter: str) -> None:
        """Advance by a character that can come next."""
        items = [
            _advanced((name, production, dot, origin))
            for name, production, dot, origin in self._columns[-1]
            if dot < len(production) and not isinstance(production[dot], str) and letter in production[dot]
        ]
        self._columns.append(self._closed(len(self._columns), items))
        self.text += letter

    def can_read(self, text: str) -> bool:
        """Return whether a text can come next."""
        depth = len(self._columns)
        before = self.text
        try:
            for letter in text:
                if letter not in self.next_letters():
                    return False
                self.read(letter)
            return True
        finally:
            del self._columns[depth:]
            self.text = before


def _advanced(item: Item) -> Item:
    name, production, dot, origin = item
    return name, production, dot + 1, origin
