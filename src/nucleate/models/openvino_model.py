"""A model that was converted for OpenVINO: its paged attention reads and writes the blocks of the engine.

``optimum-cli export openvino`` writes such models, with one attention cache per sequence. OpenVINO itself replaces that
by paged attention, whose inputs are the block tables. The weights keep the precision of the conversion.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.models.batch_invariance import is_batch_invariant
from nucleate.models.model_files import positive_integer, read_config
from nucleate.models.paged_cache import BatchLayout
from nucleate.models.protocol import ModelError
from nucleate.models.runner import CONTEXT_TOKENS, ModelInput, Runner, RunnerContext, blocks_in
from nucleate.parameters.converters import install_extra, one_line, shown
from nucleate.parameters.parameter import ParameterError

MODEL_FILE = "openvino_model.xml"
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""Types to compute with, and their names in OpenVINO."""
PRECISION, CACHE_PRECISION = "INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"
INPUTS = frozenset(
    {
        *("input_ids", "position_ids", "past_lens", "subsequence_begins", "block_indices", "block_indices_begins"),
        "max_context_len",
    }
)
"""The inputs of a model with paged attention, besides its caches."""
LOGITS_INDICES = "logits_indices"
ELEMENTWISE = ("Add", "Convert", "Divide", "Multiply", "Tanh")
"""Operations between the head and the logits: soft caps and scales."""
INVARIANT_ROWS = 56
"""Tokens per forward pass with batch invariance, at most: from 65 on, matrix products use another kernel."""
TEST_BLOCKS = 8
"""The KV cache of the test of batch invariance."""


class OpenVinoModel:
    """A model in a folder with ``openvino_model.xml`` and ``config.json``; see ``Model``.

    dtype: the type to compute with, "auto" for OpenVINO's choice: bfloat16 on processors with instructions for it.
    properties: of OpenVINO, such as ``{"KV_CACHE_PRECISION": "f16"}``. plain: keep keys and values in a type in which
    each token is stored on its own, for batch invariance. Raises ModelError, ParameterError.
    """

    can_be_batch_invariant = True

    def __init__(
        self, folder: Path, dtype: str = "auto", properties: Mapping[str, Any] | None = None, *, plain: bool = False
    ) -> None:
        if not (folder / MODEL_FILE).is_file():
            raise ModelError(f"{folder} has no {MODEL_FILE}; convert the model with optimum-cli export openvino")
        config = read_config(folder / "config.json")
        config = config.get("text_config") or config
        self.context_length = positive_integer(config, "max_position_embeddings", 1 << 20)
        self.properties = {**({CACHE_PRECISION: "f16"} if plain else {}), **(properties or {})}
        if dtype != "auto":
            self.properties.setdefault(PRECISION, TYPES[dtype])
        self.compiled = _compile(folder / MODEL_FILE, self.properties)
        self.vocab_size = int(self.compiled.output(0).partial_shape[-1].get_length())

    @property
    def runtime(self) -> str:
        """See ``Model.runtime``."""
        computed, cached = (self.compiled.get_property(name).get_type_name() for name in (PRECISION, CACHE_PRECISION))
        return f"openvino cpu {computed}, KV cache {cached}"

    @cached_property
    def caches(self) -> list[tuple[str, Any, list[int]]]:
        """The name, type and shape of a block of each input with keys or values."""
        found = []
        for port in self.compiled.inputs:
            if "_cache." in port.any_name:
                _, *shape = port.partial_shape
                found.append((port.any_name, port.element_type, [size.get_length() for size in shape]))
        return found

    @cached_property
    def block_size(self) -> int:
        """Tokens per block. Blocks of quantised keys have further rows with their scales."""
        found: int = min(shape[1] for name, _, shape in self.caches if name.startswith("value_cache."))
        return found

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block, all layers together."""
        return sum(_bytes(kind, shape) for _, kind, shape in self.caches)

    @property
    def token_bytes(self) -> int:
        """Bytes of the KV cache per token."""
        return -(-self.block_bytes // self.block_size)

    @cached_property
    def least_rows(self) -> int:
        """Of a forward pass that is the same in every batch, tested with this model; 0 if there is none."""
        threads: int = self.compiled.get_property("INFERENCE_NUM_THREADS")
        if any(kind.bitwidth < 16 for _, kind, _ in self.caches):  # keys of a block have common scales
            return 0
        for least in sorted({1, 2, threads, 8, 16}):  # 8: bfloat16 with AMX
            runner = OpenVinoRunner(self, TEST_BLOCKS, least_rows=least)
            if is_batch_invariant(runner, INVARIANT_ROWS):
                return least
        return 0

    def new_runner(self, memory: int, *, batch_invariant: bool = False) -> OpenVinoRunner:
        """A runner with so many bytes of KV cache. Raises ModelError."""
        least = self.least_rows if batch_invariant else 0
        return OpenVinoRunner(self, blocks_in(memory, self.block_bytes), least_rows=least)

    def begin(self) -> RunnerContext:
        """See ``Model.begin``."""
        tokens = min(self.context_length, CONTEXT_TOKENS)
        return RunnerContext(OpenVinoRunner(self, -(-tokens // self.block_size)))


def _bytes(kind: Any, shape: Sequence[int]) -> int:
    return int(-(-kind.bitwidth * math.prod(shape) // 8))


def _compile(path: Path, properties: dict[str, Any]) -> Any:
    """Load a model, replace its attention, and compile it."""
    try:
        import openvino
        from openvino import opset13
        from openvino._offline_transformations import paged_attention_transformation
    except ImportError:
        raise ModelError(f"{path} needs openvino: {install_extra('openvino')}") from None
    core = openvino.Core()
    try:
        model = core.read_model(path)
        paged_attention_transformation(model)
        names = {port.any_name for port in model.inputs}
        other = {name for name in names if "_cache." not in name} - INPUTS
        if other:
            raise ModelError(f"{path} has inputs that are not of a language model: {', '.join(sorted(other))}")
        head = model.get_results()[0]
        while head.get_type_name() != "MatMul":
            operand = max(head.input_values(), key=lambda value: value.get_partial_shape().rank.get_length())
            head = operand.get_node()
            if head.get_type_name() not in (*ELEMENTWISE, "MatMul"):
                raise ModelError(f"{path} has no head: its logits come from {head.get_type_name()}")
        indices = opset13.parameter([-1], np.int64, name=LOGITS_INDICES)
        indices.output(0).set_names({LOGITS_INDICES})
        rows = opset13.gather(head.input_value(0), indices, opset13.constant(0, np.int64))
        head.input(0).replace_source_output(rows.output(0))
        model.add_parameters([indices])
        model.validate_nodes_and_infer_types()
        return core.compile_model(model, "CPU", properties)
    except ModelError:
        raise
    except RuntimeError as error:
        raise ModelError(f"OpenVINO cannot load {path}: {one_line(error)}") from error


class OpenVinoRunner(Runner):
    """See ``Runner``. blocks: of the KV cache.

    least_rows: for batch invariance. If it is not 0, each token is computed as a sequence of its own, in forward passes
    of so many rows at least and INVARIANT_ROWS at most; a few tokens are repeated. OpenVINO has other kernels for a
    single row, for many, and for prompts.
    """

    copies_blocks = True

    def __init__(self, model: OpenVinoModel, blocks: int, *, least_rows: int = 0) -> None:
        import openvino

        self.vocab_size, self.context_length, self.runtime = model.vocab_size, model.context_length, model.runtime
        self.block_size, self.blocks, self._least_rows = model.block_size, blocks, least_rows
        self.batch_invariant = least_rows > 0
        self._request = model.compiled.create_infer_request()
        self._caches = []  # arrays of bytes [blocks, bytes of a block]: the system assigns memory when it is written
        for name, kind, shape in model.caches:
            array = np.zeros((blocks, _bytes(kind, shape)), np.uint8)
            self._request.set_tensor(name, openvino.Tensor(array, openvino.Shape([blocks, *shape]), kind))
            self._caches.append(array)

    def forward(self, inputs: Sequence[ModelInput]) -> NDArray[np.float32]:
        """See ``Runner.forward``. The logits are valid until the next call.

        Raises ValueError for ids outside the vocabulary and positions past the context, and ModelError.
        """
        if not inputs:
            return np.empty((0, self.vocab_size), np.float32)
        layout = BatchLayout(inputs, self.block_size)
        first_P, start_P, stop_P, table_P = layout.inputs.T
        if stop_P.max() > self.context_length:
            raise ValueError(f"{stop_P.max()} tokens exceed the context length {self.context_length}")
        if layout.ids_T.min() < 0 or layout.ids_T.max() >= self.vocab_size:
            raise ValueError(f"token ids must be in 0..{self.vocab_size - 1}")
        if not self._least_rows:
            return self._infer(layout, layout.ids_T, start_P, first_P, table_P, layout.logits_indices)
        parts: list[NDArray[np.float32]] = []
        tables_T = np.repeat(table_P, stop_P - start_P)
        for begin in range(0, layout.size, INVARIANT_ROWS):
            if parts:
                parts[-1] = parts[-1].copy()
            rows = np.arange(begin, min(begin + INVARIANT_ROWS, layout.size))
            wanted = layout.logits_indices[np.isin(layout.logits_indices, rows)] - begin
            padded, indices = self._pad(rows), self._pad(wanted)
            place = layout.ids_T[padded], layout.positions_T[padded], np.arange(len(padded)), tables_T[padded]
            parts.append(self._infer(layout, *place, indices)[: len(wanted)])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _pad(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Repeat the last one, up to the least number of rows."""
        missing = self._least_rows - len(rows)
        return np.pad(rows, (0, missing), "edge") if missing > 0 and len(rows) else rows

    def _infer(
        self,
        layout: BatchLayout,
        ids_T: NDArray[np.int64],
        past_P: NDArray[np.int64],
        first_P: NDArray[np.int64],
        table_P: NDArray[np.int64],
        logits_indices: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """The logits of some tokens. For each sequence, its past tokens, its first new token and its block table."""
        count_P = np.diff(first_P, append=len(ids_T))
        blocks_P = -(-(past_P + count_P) // self.block_size)
        ends_P = blocks_P.cumsum()
        blocks = np.repeat(table_P - ends_P + blocks_P, blocks_P) + np.arange(ends_P[-1])
        values = {
            "input_ids": ids_T,
            "position_ids": np.repeat(past_P - first_P, count_P) + np.arange(len(ids_T)),
            "past_lens": past_P.astype(np.int32),
            "subsequence_begins": np.append(first_P, len(ids_T)).astype(np.int32),
            "block_indices": layout.blocks[blocks],
            "block_indices_begins": np.append(0, ends_P).astype(np.int32),
            "max_context_len": np.array((past_P + count_P).max(), np.int32),
            LOGITS_INDICES: logits_indices,
        }
        try:
            self._request.infer(values, share_inputs=True)
        except RuntimeError as error:
            raise ModelError(f"OpenVINO: {one_line(error)}") from error
        logits: NDArray[np.float32] = self._request.get_output_tensor(0).data
        return logits.reshape(-1, self.vocab_size)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See ``Runner.copy_blocks``."""
        for source, target in pairs:
            for array in self._caches:
                array[target] = array[source]


def weights_of(folder: Path) -> tuple[str, int]:
    """The types of the weights in a folder by their names in OpenVINO, and the bytes of all. Reads no weights."""
    constant = re.compile(r'<data element_type="(\w+)"[^>]* size="(\d+)"')
    sizes: Counter[str] = Counter()
    for kind, size in constant.findall((folder / MODEL_FILE).read_text("utf-8")):
        sizes[kind] += int(size)
    total = sizes.total()
    return "/".join(kind for kind, size in sizes.most_common() if size >= total / 10), total


def check_properties(given: Any) -> dict[str, Any]:
    """The properties of OpenVINO that ``LLM`` was given. Raises ParameterError."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ParameterError(
            "openvino_properties", f"openvino_properties must be a dict with names as keys, got {shown(given)}"
        )
    return dict(given)
