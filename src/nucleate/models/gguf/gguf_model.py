"""A GGUF model, loaded by llama.cpp: what its file says about it, its vocabulary, and the parameters it recommends."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nucleate.models.batch_invariance import LENGTHS, is_batch_invariant
from nucleate.models.gguf.batched_gguf import MAX_SLOTS, BatchedGguf
from nucleate.models.gguf.gguf_options import CACHE_TYPES, DEFAULT_OPTIONS, GgufOptions
from nucleate.models.gguf.llama_library import collected_errors, llama_cpp, reason
from nucleate.models.protocol import ModelError
from nucleate.models.runner import CONTEXT_TOKENS, RunnerContext
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError

UNKNOWN, CONTROL, USER_DEFINED = 1 << 0, 1 << 3, 1 << 4
"""Attributes of tokens."""
ROLES = ("bos", "eos", "sep", "pad", "mask")
"""Special tokens that llama.cpp knows by role."""


class GgufVocabulary:
    """A vocabulary. Valid while its model is."""

    def __init__(self, lib: Any, pointer: Any) -> None:
        self._lib, self._pointer = lib, pointer
        self.size: int = lib.llama_vocab_n_tokens(pointer)
        self.has_tokenizer: bool = lib.llama_vocab_type(pointer) != lib.LLAMA_VOCAB_TYPE_NONE

    def text(self, token: int) -> str:
        """The token string, as it is in the file."""
        return (self._lib.llama_vocab_get_text(self._pointer, token) or b"").decode(errors="replace")

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text, also a special one."""
        function, buffer = self._lib.llama_token_to_piece, ctypes.create_string_buffer(64)
        length = function(self._pointer, token, buffer, len(buffer), 0, True)
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = function(self._pointer, token, buffer, len(buffer), 0, True)
        return buffer.raw[: max(length, 0)]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The control tokens and the unknown token: llama.cpp leaves them out of texts."""
        return frozenset(token for token, found in self._marked if found & (UNKNOWN | CONTROL))

    @cached_property
    def added_ids(self) -> Sequence[int]:
        """The tokens that llama.cpp finds as a whole in a text, but does not leave out of texts."""
        return [token for token, found in self._marked if found & USER_DEFINED]

    @cached_property
    def _marked(self) -> list[tuple[int, int]]:
        """The tokens with any of these attributes, and their attributes."""
        get, marks = self._lib.llama_vocab_get_attr, UNKNOWN | CONTROL | USER_DEFINED
        return [(token, found) for token in range(self.size) if (found := get(self._pointer, token)) & marks]

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end an output: EOS, end of turn and others."""
        is_end = self._lib.llama_vocab_is_eog
        return frozenset(token for token in range(self.size) if is_end(self._pointer, token))

    @cached_property
    def special_tokens(self) -> Mapping[str, str]:
        """By role: ``{"bos_token": "<s>", ...}``."""
        found = {}
        for role in ROLES:
            token = getattr(self._lib, f"llama_vocab_{role}")(self._pointer)
            if 0 <= token < self.size:
                found[f"{role}_token"] = self.text(token)
        return found

    @cached_property
    def bos_token_id(self) -> int | None:
        """The token before a text."""
        token: int = self._lib.llama_vocab_bos(self._pointer)
        return token if 0 <= token < self.size else None

    @cached_property
    def strips_first_space(self) -> bool:
        """Whether llama.cpp removes the space before the first word: it adds one before each text."""
        if not self.has_tokenizer:
            return False
        words = [token for token in self.tokenize(" a", add_special=False) if token not in self.special_ids]
        return bool(words) and self.detokenize(words) != b"".join(map(self.piece, words))

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        """The ids of a text; special tokens in it are found. add_special: add those around a text, such as BOS.

        Raises ModelError if the file has no tokenizer, ValueError for a text that is too long.
        """
        if not self.has_tokenizer:
            raise ModelError("the GGUF file has no tokenizer; give one with --tokenizer")
        data = text.encode()
        room = len(data) + 8
        for _ in range(2):
            tokens = (self._lib.llama_token * room)()
            count = self._lib.llama_tokenize(self._pointer, data, len(data), tokens, room, add_special, True)
            if count >= 0:
                return list(tokens[:count])
            room = -count
        raise ValueError(f"llama.cpp cannot tokenize {len(data)} bytes")

    def detokenize(self, ids: list[int]) -> bytes:
        """llama.cpp's own text of some tokens, without special ones."""
        room = sum(len(self.piece(token)) for token in ids) + 8
        buffer = ctypes.create_string_buffer(room)
        tokens = (self._lib.llama_token * len(ids))(*ids)
        length = self._lib.llama_detokenize(self._pointer, tokens, len(ids), buffer, room, True, False)
        return buffer.raw[: max(length, 0)]


TILED = "GGML_CPU_TILED_MM"
"""Whether llama.cpp computes products of eight rows and more with other kernels. It reads this once in a process."""
ROW_MULTIPLES = {True: (1, 2, 8), False: (8,)}
"""Multiples of rows that may make all matrix products compute each row alike, the cheapest first, for plain kernels and
others. Others may round ties differently for a few rows, which is too rare for a short test."""
RECURRENT_SLOTS = 64
"""Sequences of a recurrent model, which allocates the state of all of them."""
TEST_TOKENS = 256
"""The KV cache of the test of batch invariance."""
DEFAULT_TOKENS = 1 << 15
"""The default size of the KV cache, unless one sequence needs more."""


class GgufModel:
    """A model in a GGUF file; see ``Model``. path: the file, or the first one of a split model.

    vocab_only: load no weights. plain: use only kernels that compute each row alike, for batch invariance. They are as
    fast for a few sequences, and for many up to a third slower. Raises ModelError with a reason for a file that
    llama.cpp cannot load, and for models that do not generate text token by token.
    """

    can_be_batch_invariant = True

    def __init__(
        self, path: Path, options: GgufOptions = DEFAULT_OPTIONS, *, vocab_only: bool = False, plain: bool = False
    ) -> None:
        self.path, self.options = path, options
        lib = self._lib = llama_cpp()
        params = lib.llama_model_default_params()
        params.n_gpu_layers, params.vocab_only = options.n_gpu_layers, vocab_only
        self._plain = plain and not self.uses_gpu
        if self._plain:
            params.use_extra_bufts = False  # repacked weights: products of four rows and more differ
            os.environ.setdefault(TILED, "0")
        with collected_errors() as errors:
            self.pointer = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self.pointer:
            raise ModelError(f"llama.cpp cannot load {path}: {reason(errors, 'no memory')}")
        weakref.finalize(self, lib.llama_model_free, self.pointer)
        self.vocabulary = GgufVocabulary(lib, lib.llama_model_get_vocab(self.pointer))
        self.vocab_size = self.vocabulary.size or int(self.metadata.get(f"{self.architecture}.vocab_size", 0))
        self.context_length = self._largest("context_length", 1)
        kind = None
        if lib.llama_model_has_encoder(self.pointer) or not lib.llama_model_has_decoder(self.pointer):
            kind = "an encoder"
        elif lib.llama_model_is_diffusion(self.pointer):
            kind = "a diffusion model"
        if kind is not None and not vocab_only:
            raise ModelError(f"{path} does not generate text token by token: {self.architecture} is {kind}")

    @property
    def runtime(self) -> str:
        """See ``Model.runtime``."""
        return f"llama.cpp {'gpu' if self.uses_gpu else 'cpu'} {self.file_type}"

    @property
    def uses_gpu(self) -> bool:
        """Whether layers are on a GPU, if there is one."""
        return bool(self.options.n_gpu_layers and self._lib.llama_supports_gpu_offload())

    @property
    def recurrent(self) -> bool:
        """Whether the cache is a state that cannot be cut or shared in part, in some layers at least."""
        lib = self._lib
        return bool(lib.llama_model_is_recurrent(self.pointer) or lib.llama_model_is_hybrid(self.pointer))

    @cached_property
    def metadata(self) -> Mapping[str, str]:
        """The key-value pairs of the file, as llama.cpp writes them; long arrays are shortened."""
        lib = self._lib
        return {
            _text(lib.llama_model_meta_key_by_index, self.pointer, index): _text(
                lib.llama_model_meta_val_str_by_index, self.pointer, index
            )
            for index in range(lib.llama_model_meta_count(self.pointer))
        }

    @property
    def architecture(self) -> str:
        """Such as "llama"."""
        return self.metadata.get("general.architecture", "")

    @property
    def file_type(self) -> str:
        """The type of most weights, such as "Q4_K - Medium"."""
        number = self.metadata.get("general.file_type", "")
        name = self._lib.llama_ftype_name(int(number)) if number.isdecimal() else None
        return name.decode().removeprefix("all ") if name else "unknown"

    @property
    def num_parameters(self) -> int:
        """The number of weights."""
        return int(self._lib.llama_model_n_params(self.pointer))

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self._largest("block_count", 1)

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return int(self._lib.llama_model_size(self.pointer))

    @property
    def chat_template(self) -> str | None:
        """The Jinja source in the file."""
        return self.metadata.get("tokenizer.chat_template")

    @property
    def token_bytes(self) -> int:
        """Bytes of the KV cache per token: of layers with attention, at most."""
        options = self.options
        heads, width = self._largest("attention.head_count", 1), self._largest("embedding_length", 1)
        kv_heads = self._largest("attention.head_count_kv", heads)
        sizes = [
            self._largest(f"attention.{name}_length", width // heads) * CACHE_TYPES[kind][1]
            for name, kind in (("key", options.cache_type_k), ("value", options.cache_type_v))
        ]
        return max(int(self.num_layers * kv_heads * sum(sizes)), 1)

    def _largest(self, key: str, default: int) -> int:
        """The largest number in a value of the metadata, which may differ by layer."""
        text = self.metadata.get(f"{self.architecture}.{key}", "").strip("[]")
        numbers = [int(one) for one in text.split(",") if one.strip().isdecimal()]
        return max(numbers, default=default) or default

    @property
    def default_tokens(self) -> int:
        """The default size of the KV cache in tokens. llama.cpp writes to all of it at the start."""
        return max(self.context_length, DEFAULT_TOKENS)

    def new_runner(self, memory: int, *, batch_invariant: bool = False) -> BatchedGguf:
        """A runner of its own context of llama.cpp, with so many bytes of KV cache. Raises ModelError."""
        options = self.options
        slots = options.n_seq_max or (RECURRENT_SLOTS if self.recurrent else MAX_SLOTS)
        memory = options.n_ctx * self.token_bytes if options.n_ctx else memory
        return BatchedGguf(self, memory, slots=slots, row_multiple=self.row_multiple if batch_invariant else 0)

    @cached_property
    def row_multiple(self) -> int:
        """Of micro-batches that are the same in every batch, tested with this model; 0 if there is none.

        Recurrent models and those on GPUs are not tested: their states and kernels depend on the batch in other ways.
        """
        if self.recurrent or self.uses_gpu or self.options.flash_attn == "off":
            return 0
        for multiple in ROW_MULTIPLES[self._plain]:
            runner = BatchedGguf(self, TEST_TOKENS * self.token_bytes, slots=len(LENGTHS), row_multiple=multiple)
            if is_batch_invariant(runner):
                return multiple
        return 0

    def begin(self) -> RunnerContext:
        """See ``Model.begin``."""
        size = min(self.context_length, CONTEXT_TOKENS)
        return RunnerContext(BatchedGguf(self, size * self.token_bytes, slots=1))


def _text(function: Any, *arguments: Any) -> str:
    """The result of a function of llama.cpp that writes a text to a buffer."""
    buffer = ctypes.create_string_buffer(1 << 10)
    length = function(*arguments, buffer, len(buffer))
    if length >= len(buffer):
        buffer = ctypes.create_string_buffer(length + 1)
        function(*arguments, buffer, len(buffer))
    return buffer.value.decode(errors="replace")


PREFIX = "general.sampling."
FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "xtc_probability": "xtc_probability",
        "xtc_threshold": "xtc_threshold",
        "penalty_repeat": "repetition_penalty",
        "penalty_last_n": "penalty_last_n",
    }
)
"""Sampling parameters in GGUF files, and the fields of SamplingParams."""
MIROSTAT = {"1": "mirostat_v1", "2": "mirostat"}


class GgufSource:
    """See ``ModelSource``. path: of the file, also ``folder`` for messages."""

    in_memory = None

    def __init__(self, path: Path, options: GgufOptions, *, plain: bool) -> None:
        self.folder, self._options, self._plain = path, options, plain

    @classmethod
    def of(cls, path: Path, options: Any, *, device: str, dtype: str, runtime: str, plain: bool) -> GgufSource:
        """Check the arguments that apply to models in folders. Raises ModelError, ParameterError."""
        for name, value, allowed in (("dtype", dtype, ("auto",)), ("runtime", runtime, ("auto", "llama.cpp"))):
            if value not in allowed:
                raise ParameterError(name, f"{name} cannot be set for a GGUF model, got {shown(value)}")
        chosen = GgufOptions.of(options, device)
        if device not in ("auto", "cpu"):
            if not device.startswith("cuda") or device not in ("cuda", "cuda:0"):
                raise ParameterError(
                    "device", f"device must be auto, cpu or cuda for a GGUF model, got {shown(device)}"
                )
            if not llama_cpp().llama_supports_gpu_offload():
                raise ModelError("device cuda needs a build of llama-cpp-python for GPUs")
        return cls(path, chosen, plain=plain)

    @cached_property
    def _model(self) -> GgufModel:
        return GgufModel(self.folder, self._options, plain=self._plain)

    def load(self) -> GgufModel:
        """Load the model. Raises ModelError."""
        return self._model

    @property
    def generation_config_name(self) -> str:
        """What errors call the recommended parameters."""
        return f"the sampling parameters in {self.folder}"

    def recommended(self) -> dict[str, Any]:
        """The fields of SamplingParams that the file sets. Raises ModelError."""
        return recommended(self._model.metadata)

    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end an output. Raises ModelError."""
        return self._model.vocabulary.eos_token_ids


def recommended(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The fields of SamplingParams that the metadata of a file sets."""
    given = {key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)}
    values = {field: _number(given[name]) for name, field in FIELDS.items() if name in given}
    if stage := MIROSTAT.get(given.get("mirostat", "")):
        values[f"{stage}_tau"] = _number(given.get("mirostat_tau", "5"))
        values[f"{stage}_eta"] = _number(given.get("mirostat_eta", "0.1"))
    return values


def _number(text: str) -> Any:
    """A value of the metadata."""
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() and "." not in text else value
