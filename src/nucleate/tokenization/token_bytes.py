"""What each token id adds to the text, read from a tokenizer's own decoder description. Keeps no state.

A Hugging Face ``tokenizers`` decoder is a list of steps over the list of token strings. Steps that look at one token at
a time are applied here, once, for the whole vocabulary; what is left is how neighbours join, and there are four ways:

========  ==================================================================================================
family    how tokens join
========  ==================================================================================================
utf8      the bytes of all tokens in a row are UTF-8, invalid parts become U+FFFD (byte-level BPE)
text      every token is text; a run of byte tokens ``<0xNN>`` is one UTF-8 string, or wholly U+FFFD if it is invalid;
          ``strip`` says what is cut from the start of the text (metaspace, byte fallback, WordPiece, no decoder)
suffix    a marker that is a space, except in the last token, where it is nothing (``BPEDecoder``)
whole     only the decoder knows (anything else): nothing is certain before the last token
========  ==================================================================================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import tokenizers

Family = Literal["utf8", "text", "suffix", "whole"]
Piece = str | bytes  # str: text that needs no neighbour; bytes: to be decoded together with the bytes around it
Step = Callable[[str, bool], str]  # (token, is it the first of all tokens) -> token

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>", re.ASCII)  # the library parses the digits with a sign
# The order matters: these are applied one after another, to each token alone.
_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def _byte_characters() -> dict[str, int]:
    """The characters that byte-level BPE writes for bytes: printable Latin-1 is itself, the rest is moved up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(moved)}


_BYTE_OF = _byte_characters()
_BYTE_CHARACTERS = frozenset(_BYTE_OF)
_TO_LATIN_1 = str.maketrans({character: chr(byte) for character, byte in _BYTE_OF.items()})


@dataclass(frozen=True)
class Joining:
    """A decoder, taken apart: the steps that see one token at a time, and how the results join."""

    family: Family
    steps: tuple[Step, ...] = ()
    bytes_tokens: bool = False  # whether <0xNN> is a byte
    strip: tuple[str, int] = ("", 0)  # this character is cut from the start of the text, at most so often
    suffix: str = ""

    def piece(self, token: str, first: bool) -> Piece:
        """What ``token`` adds, as the first of all tokens or after others."""
        for step in self.steps:
            token = step(token, first)
        if self.family == "utf8":
            return _utf8_piece(token)
        if self.bytes_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token


def _utf8_piece(token: str) -> Piece:
    # One character outside the alphabet, and the whole token is taken as it is written (added tokens with spaces).
    known = _BYTE_CHARACTERS.issuperset(token)
    data = token.translate(_TO_LATIN_1).encode("latin-1") if known else token.encode()
    try:
        return data.decode() or data
    except UnicodeDecodeError:
        return data


@dataclass(frozen=True)
class Pieces:
    """The table of a vocabulary: ``table[token_id]`` is what the token adds after other tokens (see ``Piece``)."""

    joining: Joining
    tokens: Mapping[int, str]
    table: Mapping[int, Piece] = field(repr=False)
    decode_tokens: Callable[[list[str]], str]  # the decoder itself, for the family "whole"

    @property
    def family(self) -> Family:
        return self.joining.family

    def first(self, token_id: int) -> Piece:
        """What the token adds as the first of all tokens: some decoders drop the space before the first word."""
        return self.joining.piece(self.tokens[token_id], first=True)

    def as_bytes(self, token_id: int) -> bytes:
        """The bytes the token adds after other tokens; for the families "suffix" and "whole" the token as written."""
        piece = self.table[token_id]
        return piece if isinstance(piece, bytes) else piece.encode()


def read_pieces(tokenizer: tokenizers.Tokenizer) -> Pieces:
    """The table of a ``tokenizers.Tokenizer``; some milliseconds per ten thousand tokens, so keep it."""
    decoder = tokenizer.decoder
    joining = read_decoder(json.loads(decoder.__getstate__()) if decoder is not None else None)
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    named = ((token_id, tokenizer.id_to_token(token_id)) for token_id in range(highest + 1))
    tokens = {token_id: token for token_id, token in named if token is not None}
    table = {token_id: joining.piece(token, first=False) for token_id, token in tokens.items()}
    return Pieces(joining, tokens, table, decoder.decode if decoder is not None else " ".join)


def read_decoder(decoder: Mapping[str, Any] | None) -> Joining:
    """Take a decoder's JSON apart. An order of steps that is not understood is the family "whole", not a guess."""
    if decoder is None:
        return Joining("text", (_join_with_space,))
    steps: list[Step] = []
    bytes_tokens = fused = utf8 = False
    strip = ("", 0)
    chain = list(_flat(decoder))
    if [link["type"] for link in chain] == ["BPEDecoder"]:
        return Joining("suffix", suffix=chain[0]["suffix"])
    for link in chain:
        kind = link["type"]
        step = None if fused or bytes_tokens else _step(link)
        if step is not None:
            steps.append(step)
        elif kind == "ByteLevel" and not fused and not bytes_tokens:
            utf8 = fused = True
        elif kind == "ByteFallback" and not fused and not bytes_tokens:
            bytes_tokens = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and not utf8 and link["stop"] == 0 and not strip[1]:
            strip = (link["content"], link["start"])
        else:
            return Joining("whole")
    return Joining("utf8" if utf8 else "text", tuple(steps), bytes_tokens, strip)


def _flat(decoder: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for link in decoder["decoders"]:
        yield from _flat(link)


def _step(link: Mapping[str, Any]) -> Step | None:
    """A decoder step as a function of one token, or None if it needs more than one token or is not known."""
    kind = link["type"]
    if kind == "Replace":
        return _replace(link["pattern"], link["content"])
    if kind == "Metaspace":
        return _metaspace(link["replacement"], link["prepend_scheme"] != "never")
    if kind == "WordPiece":
        return _word_piece(link["prefix"], link["cleanup"])
    if kind == "Strip" and link["stop"] == 0:
        return _strip(link["content"], link["start"])
    return None


def _join_with_space(token: str, first: bool) -> str:
    return token if first else " " + token


def _replace(pattern: Mapping[str, str], content: str) -> Step | None:
    if "Regex" in pattern:
        import tokenizers

        # The pattern is in the library's own regex dialect, so the library applies it.
        decode = tokenizers.decoders.Replace(tokenizers.Regex(pattern["Regex"]), content).decode
        return lambda token, _first: decode([token])
    text = pattern["String"]
    return (lambda token, _first: token.replace(text, content)) if text else None


def _metaspace(mark: str, drop_in_first: bool) -> Step:
    return lambda token, first: token.replace(mark, "" if first and drop_in_first else " ")


def _word_piece(prefix: str, cleanup: bool) -> Step:
    def step(token: str, first: bool) -> str:
        if not first:
            token = token[len(prefix) :] if token.startswith(prefix) else " " + token
        for dirty, clean in _CLEANUP if cleanup else ():
            token = token.replace(dirty, clean)
        return token

    return step


def _strip(content: str, count: int) -> Step:
    def step(token: str, first: bool) -> str:
        return token[min(count, len(token) - len(token.lstrip(content))) :]

    return step
