"""Grammars for the bundled tokenizer, what their masks allow, and the texts that they accept."""

from __future__ import annotations

import itertools
import json
from functools import cache
from typing import Any

import numpy as np

import nucleate as nc
from nucleate.structured_output import CompiledGrammar, GrammarCompiler, GrammarMatcher, StructuredOutputs

SIZE = 4096
TOKENIZER = nc.LLM().tokenizer


@cache
def bundled_compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, SIZE)


def grammar_of(**fields: Any) -> CompiledGrammar:
    """The grammar of ``StructuredOutputs`` with these fields."""
    return bundled_compiler().compile(StructuredOutputs(**fields))


def tokens_of(text: str) -> list[int]:
    """The usual tokens of a text."""
    return TOKENIZER.encode(text, add_special_tokens=False)


def mask_of(matcher: GrammarMatcher) -> np.ndarray:
    mask_W = np.full(len(matcher._eos_mask_W), -1, np.int32)
    matcher.fill_bitmask(mask_W)
    return mask_W


def allowed(matcher: GrammarMatcher) -> list[int]:
    """The tokens that the mask allows, in order."""
    return np.flatnonzero(np.unpackbits(mask_of(matcher).view(np.uint8), bitorder="little")).tolist()


@cache
def _token_of_byte() -> dict[int, int]:
    data = {token: TOKENIZER.pieces.as_bytes(token) for token in TOKENIZER.pieces.table if token < SIZE}
    return {each[0]: token for token, each in data.items() if len(each) == 1 and token not in TOKENIZER.special_ids}


def can_write(grammar: CompiledGrammar, text: str) -> bool:
    """Whether a grammar accepts a text byte for byte, and may end there."""
    matcher = grammar.matcher()
    try:
        for byte in text.encode():
            matcher.accept_token(_token_of_byte()[byte])
    except ValueError:
        return False
    return matcher.accepting


def can_write_value(grammar: CompiledGrammar, value: Any) -> bool:
    """Whether a grammar accepts a value, with its names in any order: a grammar fixes their order."""
    orders: list[Any] = [value]
    if isinstance(value, dict):  # all orders of four names, and the same number of longer ones
        orders = [dict(each) for each in itertools.islice(itertools.permutations(value.items()), 24)]
    return any(can_write(grammar, json.dumps(each, separators=(",", ":"))) for each in orders)
