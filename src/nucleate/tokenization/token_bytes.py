"""The text or bytes of each token id, read from the description of a tokenizer's decoder. Stateless.

A Hugging Face ``tokenizers`` decoder is a list of steps over the list of token strings. Steps that process one token at
a time are applied here, once, for the whole vocabulary. How the results join depends on the family of the decoder:

========  ==================================================================================================
family    how tokens join
========  ==================================================================================================
utf8      the concatenated bytes of all tokens are UTF-8; invalid parts become U+FFFD (byte-level BPE)
text      every token is text; a run of byte tokens ``<0xNN>`` is one UTF-8 string, or all U+FFFD if it is invalid;
          ``strip`` is removed from the start of the text (metaspace, byte fallback, WordPiece, no decoder)
suffix    a marker stands for a space, except in the last token, where it is removed (``BPEDecoder``)
whole     any other decoder, which must see all tokens: no text is final before the last token
========  ==================================================================================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

if TYPE_CHECKING:
    import tokenizers

P = ParamSpec("P")
T = TypeVar("T")

Family = Literal["utf8", "text", "suffix", "whole"]
Piece = str | bytes  # str: complete text; bytes: to be decoded together with adjacent bytes
Step = Callable[[str, bool], str]  # (token, whether it is the first of all tokens) -> token

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>", re.ASCII)  # the library parses the digits with a sign
# Applied in this order, to each token.
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


def without_panics(function: Callable[P, T]) -> Callable[P, T]:
    """The function, with panics of the library as ValueError: they are no ``Exception``, and would end the engine."""

    def call(*args: P.args, **named: P.kwargs) -> T:
        try:
            return function(*args, **named)
        except Exception:
            raise
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # KeyboardInterrupt and the like
                raise
            raise ValueError(f"the tokenizers library failed: {error}") from None

    return call


def _byte_characters() -> dict[str, int]:
    """The characters that stand for bytes in byte-level BPE: printable Latin-1 unchanged, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(moved)}


_BYTE_OF = _byte_characters()
_BYTE_CHARACTERS = frozenset(_BYTE_OF)
_TO_LATIN_1 = str.maketrans({character: chr(byte) for character, byte in _BYTE_OF.items()})


@dataclass(frozen=True)
class Joining:
    """A parsed decoder: the steps that process one token at a time, and how the results join."""

    family: Family
    steps: tuple[Step, ...] = ()
    bytes_tokens: bool = False  # whether <0xNN> stands for a byte
    strip: tuple[str, int] = ("", 0)  # a character to remove from the start of the text, and how often at most
    suffix: str = ""

    def piece(self, token: str, first: bool) -> Piece:
        """The piece of ``token``, as the first of all tokens or after others."""
        for step in self.steps:
            token = step(token, first)
        if self.family == "utf8":  # a token with a character outside the alphabet is literal: added tokens with spaces
            known = _BYTE_CHARACTERS.issuperset(token)
            return text_or_bytes(token.translate(_TO_LATIN_1).encode("latin-1") if known else token.encode())
        if self.bytes_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token


def text_or_bytes(data: bytes) -> Piece:
    """The piece of a token with these bytes."""
    try:
        return data.decode() or data
    except UnicodeDecodeError:
        return data


@dataclass(frozen=True)
class Pieces:
    """The pieces of a vocabulary: ``table[token_id]`` is the piece of a token after other tokens."""

    joining: Joining
    tokens: Mapping[int, str]
    table: Mapping[int, Piece] = field(repr=False)
    decode_tokens: Callable[[list[str]], str]  # the decoder, for the family "whole"

    @property
    def family(self) -> Family:
        return self.joining.family

    def first(self, token_id: int) -> Piece:
        """The piece of a token that is the first of all: some decoders remove the space before the first word."""
        return self.joining.piece(self.tokens[token_id], first=True)

    def as_bytes(self, token_id: int) -> bytes:
        """The bytes of a token after other tokens; for the families "suffix" and "whole", of the token string."""
        piece = self.table[token_id]
        return piece if isinstance(piece, bytes) else piece.encode()


def read_pieces(tokenizer: tokenizers.Tokenizer) -> Pieces:
    """The pieces of a ``tokenizers.Tokenizer``. Takes some milliseconds per ten thousand tokens."""
    decoder = tokenizer.decoder
    joining = read_decoder(json.loads(decoder.__getstate__()) if decoder is not None else None)
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    named = ((token_id, tokenizer.id_to_token(token_id)) for token_id in range(highest + 1))
    tokens = {token_id: token for token_id, token in named if token is not None}
    table = {token_id: joining.piece(token, first=False) for token_id, token in tokens.items()}
    return Pieces(joining, tokens, table, without_panics(decoder.decode) if decoder is not None else " ".join)


def read_decoder(decoder: Mapping[str, Any] | None) -> Joining:
    """Parse the JSON of a decoder. A sequence of steps that is not understood is the family "whole"."""
    if decoder is None:
        return Joining("text", (lambda token, first: token if first else " " + token,))
    steps: list[Step] = []
    bytes_tokens = fused = utf8 = False
    strip = ("", 0)
    chain = list(_flat(decoder))
    if [link["type"] for link in chain] == ["BPEDecoder"]:
        return Joining("suffix", suffix=chain[0]["suffix"])
    for link in chain:
        kind, each = link["type"], not (fused or bytes_tokens)  # each: the tokens are still separate
        if each and (step := _step(link)) is not None:
            steps.append(step)
        elif kind == "ByteLevel" and each:
            utf8 = fused = True
        elif kind == "ByteFallback" and each:
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
    """A decoder step as a function of one token, or None if it needs more than one token or is unknown."""
    match link:
        case {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}:
            import tokenizers

            # The pattern is in the regex dialect of the library, so the library applies it.
            decode = without_panics(tokenizers.decoders.Replace(tokenizers.Regex(pattern), content).decode)
            return lambda token, _first: decode([token])
        case {"type": "Replace", "pattern": {"String": text}, "content": content}:
            return (lambda token, _first: token.replace(text, content)) if text else None
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            return lambda token, first: token.replace(mark, "" if first and scheme != "never" else " ")
        case {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup}:
            return partial(_word_piece, prefix, cleanup)
        case {"type": "Strip", "content": content, "start": count, "stop": 0}:
            return lambda token, _first: token[min(count, len(token) - len(token.lstrip(content))) :]
    return None


def _word_piece(prefix: str, cleanup: bool, token: str, first: bool) -> str:
    if not first:
        token = token[len(prefix) :] if token.startswith(prefix) else " " + token
    for dirty, clean in _CLEANUP if cleanup else ():
        token = token.replace(dirty, clean)
    return token
