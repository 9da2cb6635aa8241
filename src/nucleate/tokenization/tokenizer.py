"""A ``tokenizers.Tokenizer`` with special token ids and the chat template, read from the files of a model folder.

``decode`` defines the result of the incremental detokenizer. Unlike the library, it raises an error for ids outside the
vocabulary instead of skipping them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nucleate.parameters.converters import one_line
from nucleate.parameters.parameter import ParameterError
from nucleate.tokenization.token_bytes import Pieces, read_pieces, without_panics

if TYPE_CHECKING:
    import tokenizers


_MARK = "☺"  # a text that few texts merge with
_LONG = 2000  # characters


class Tokenizer:
    """A tokenizer with its special ids and chat template.

    ``source`` is a folder with a ``tokenizer.json`` and optionally ``tokenizer_config.json``,
    ``special_tokens_map.json``, ``generation_config.json``, ``config.json``, ``chat_template.jinja``; or a
    ``tokenizers.Tokenizer``. The keyword arguments override the settings of the folder. ``padded_size``: the length of
    the model's logits if it exceeds the vocabulary; ids in between are padding, without text.

    Raises FileNotFoundError if the folder or its tokenizer.json is missing, ValueError if a file cannot be read.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int] | None = None,
        bos_token_id: int | None = None,
        chat_template: str | None = None,
        padded_size: int = 0,
    ) -> None:
        self.padded_size = padded_size
        self._containing: dict[str, list[int]] = {}
        self.config: Mapping[str, Any] = {}
        """The content of ``tokenizer_config.json``; empty without the file."""
        self.special_tokens: Mapping[str, str] = {}
        """By role: ``{"bos_token": "<s>", ...}``; chat templates use these names."""
        eos_ids = frozenset[int]()
        if isinstance(source, (str, os.PathLike)):
            folder = Path(source)
            self.backend, self.config = _read_tokenizer(folder), _read_json(folder / "tokenizer_config.json")
            self.special_tokens, eos_ids = _read_special_tokens(folder, self.config), _read_eos_ids(folder)
            chat_template = read_template(folder) if chat_template is None else chat_template
        else:
            self.backend = source
        self.chat_template = chat_template
        """The Jinja source, or None if the model has none."""
        self.bos_token_id = self._id_of("bos_token") if bos_token_id is None else bos_token_id
        if eos_token_ids is None:
            eos = self._id_of("eos_token")
            self.eos_token_ids = eos_ids | ({eos} if eos is not None else frozenset())
        else:
            self.eos_token_ids = frozenset(eos_token_ids)

    def _id_of(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)

    @cached_property
    def pieces(self) -> Pieces:
        """The text or bytes of each id; built on first use, in a fraction of a second."""
        return read_pieces(self.backend)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that ``skip_special_tokens`` leaves out."""
        # The library compares the content of tokens, so another id with the same content is left out too.
        special = {token.content for token in self.backend.get_added_tokens_decoder().values() if token.special}
        return frozenset(token_id for token_id, token in self.pieces.tokens.items() if token in special)

    @cached_property
    def special_texts(self) -> Mapping[str, int]:
        """The special ids by their token strings."""
        return {self.pieces.tokens[token_id]: token_id for token_id in self.special_ids}

    @cached_property
    def vocab_size(self) -> int:
        """The highest id plus one, added tokens included. A model may have more logits."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def base_vocab_size(self) -> int:
        """The number of tokens without added ones."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    @cached_property
    def added_ids(self) -> Sequence[int]:
        """The ids of added tokens, ascending."""
        return sorted(self.backend.get_added_tokens_decoder())

    def find_token(self, token: str) -> int | None:
        """The id of a token string of the vocabulary, or None."""
        return self.backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of ``text``. ``add_special_tokens`` adds the special tokens around a text, such as BOS.

        Raises ParameterError for text that is not valid Unicode (lone surrogates) or that cannot be encoded.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"text is not valid Unicode: {error.reason} at character {error.start}"
            raise ParameterError("prompt", message) from None
        try:
            return self._encode(text, add_special_tokens)
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            raise ParameterError("prompt", f"the tokenizer cannot encode the text: {error}") from None

    def encode_continuations(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts that each continue another: without the space that some tokenizers put before a text.

        Raises ParameterError.
        """
        if not self._adds_space:
            return [self.encode(text, add_special_tokens=False) for text in texts]
        mark = self.encode(_MARK, add_special_tokens=False)
        made = []
        for text in texts:
            ids = self.encode(_MARK + text, add_special_tokens=False)
            merges = ids[: len(mark)] != mark
            made.append(self.encode(text, add_special_tokens=False) if merges else ids[len(mark) :])
        return made

    @cached_property
    def _adds_space(self) -> bool:
        """Whether a space is put before a text, which its decoded ids have if they continue another text."""
        mark, text, both = (self.encode(one, add_special_tokens=False) for one in (_MARK, "a", f"{_MARK}a"))
        if both[: len(mark)] != mark or self.special_ids.intersection(mark):
            return False  # the mark merges with the text, or is not in the vocabulary
        return self.decode([*mark, *text], False) != self.decode(both, False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > _LONG:  # the batch API of the library releases the GIL
            encode = without_panics(self.backend.encode_batch_fast)
            return encode([text], add_special_tokens=add_special_tokens)[0].ids
        return without_panics(self.backend.encode)(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``. Raises ValueError for an id that is not in the vocabulary, or if the decoder fails."""
        known = self.pieces.tokens
        ids = list(ids)
        for token_id in ids:
            if token_id not in known and not self.is_padding(token_id):
                raise self.unknown_id(token_id)
        return self._decode(ids, skip_special_tokens)

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return without_panics(self.backend.decode)(ids, skip_special_tokens=skip_special_tokens)

    def _decode_each(self, ids: list[int]) -> list[str]:
        return without_panics(self.backend.decode_batch)([[token] for token in ids], skip_special_tokens=False)

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """The ids of a word, at the start of a text and after a space, without those that end with another of them."""
        found = {tuple(self.encode(text, add_special_tokens=False)) for text in (word, f" {word}")} - {()}
        return sorted(ids for ids in found if not any(ids != end and ids[-len(end) :] == end for end in found))

    def containing(self, text: str) -> list[int]:
        """All ids whose text contains this text."""
        if text not in self._containing:
            self._containing[text] = [token_id for token_id, own_text in self._texts.items() if text in own_text]
            if len(self._containing) > 64:  # a bound, as requests choose the text
                del self._containing[next(iter(self._containing))]
        return list(self._containing[text])

    @cached_property
    def _texts(self) -> dict[int, str]:
        ids = sorted(self.pieces.tokens)
        return dict(zip(ids, self._decode_each(ids), strict=True))

    def is_padding(self, token_id: int) -> bool:
        """Whether an id of the model is not a token of the vocabulary. Its text is empty."""
        return 0 <= token_id < self.padded_size and token_id not in self.pieces.tokens

    def unknown_id(self, token_id: int) -> ValueError:
        """The error for an id that is not in the vocabulary."""
        known = len(self.pieces.tokens)
        return ValueError(f"token id {token_id} is not in the vocabulary ({known} tokens, ids below {self.vocab_size})")


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token; bytes of an incomplete character as <0xNN>, and nothing for padding."""
    if tokenizer.is_padding(token):
        return ""
    text = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" not in text:
        return text
    return "".join(f"<0x{byte:02X}>" for byte in tokenizer.pieces.as_bytes(token))


ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Raises FileNotFoundError or ValueError with the path and the problem, on one line."""
    import tokenizers

    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder" if not folder.exists() else f"{folder}: not a folder")
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: no tokenizer.json in this folder")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise ValueError(f"{path}: not a tokenizer file: {one_line(error)}") from None
    # A file may contain truncation and padding settings of a training run.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    mapped = _read_json(folder / "special_tokens_map.json")
    tokens = {role: _content(config.get(role) or mapped.get(role)) for role in ROLES}
    return {role: token for role, token in tokens.items() if token is not None}


def _read_eos_ids(folder: Path) -> frozenset[int]:
    """The EOS ids of generation_config.json, or of config.json, where older models have them."""
    eos = _read_json(folder / "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = _read_json(folder / "config.json").get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ValueError(f"{folder}: eos_token_id must be a token id or a list of them, not {eos!r:.100}")
    return frozenset(ids)


def read_template(folder: Path) -> str | None:
    """The chat template in the files of a model folder; None without one. Raises ValueError."""
    config = _read_json(folder / "tokenizer_config.json")
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several templates, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is None or isinstance(template, str):
        return template
    raise ValueError(f"{folder}: chat_template must be a string, not {type(template).__name__}")


def _content(token: object) -> str | None:
    """The content of a special token, which is a string or an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {one_line(error)}") from None
    if not isinstance(value, dict):  # about the file, not an argument
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")  # noqa: TRY004
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None
