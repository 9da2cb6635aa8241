"""Sequences of a Transformers model in batches, in the model's own cache, padded on the left as by ``generate``.

For models that cannot use the paged KV cache: with recurrent or convolution states, or with an attention that cannot
be replaced. The sequences that generate a token share one forward pass. Their caches are joined when sequences come or
go, and stay joined in between. Prompts share one, too, if a test shows that their states are those of single ones.
A long prompt is computed in chunks. The cache of a sequence can be taken out, for others that begin with its tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.models.runner import Fork, ModelInput, SavedState, SequentialRunner
from nucleate.models.transformers.decoding_context import TOLERANCE, TransformersContext, deviation
from nucleate.models.transformers.ragged_attention import IncompatibleModelError
from nucleate.models.transformers.transformers_model import TransformersModel
from nucleate.parameters.converters import one_line

LENGTHS = (5, 4, 8)
"""Lengths of the sequences of the test; convolutions treat a few tokens as a special case."""
SIMPLE = (int, float, bool, str, type(None), torch.dtype, torch.device, type)


class Part(NamedTuple):
    """Some rows of a cache, padded on the left."""

    cache: Any
    rows: list[int]
    kept: int  #: the tokens of the longest row; those before are padding


class PaddedRunner(SequentialRunner):
    """See ``Runner``. Raises IncompatibleModelError if a test does not give the logits of single sequences.

    model: with a cache, see ``Decoding``. blocks: see ``SequentialRunner``. reason: why its cache is not paged.
    """

    model: TransformersModel
    _joins_prompts = False

    def __init__(self, model: TransformersModel, blocks: int, reason: str = "") -> None:
        super().__init__(model, blocks)
        self.unpaged_reason = reason
        self.saves_states = not model.decoding.single and not self._splits_prompt
        if model.decoding.cache is None:
            raise IncompatibleModelError("it has no cache that can be used")
        self._drop()
        try:
            with torch.inference_mode():
                self._find_dimensions()
                self._check()
        except IncompatibleModelError:
            raise
        except Exception as error:  # the model's code may raise anything
            raise IncompatibleModelError(f"a padded batch raises {type(error).__name__}: {one_line(error)}") from error

    def forward(self, inputs: Sequence[ModelInput]) -> NDArray[np.float32]:
        """See ``Runner.forward``."""
        rows: dict[int, NDArray[np.float32]] = {}
        places = {key: row for row, key in enumerate(self._keys)}
        joined = [each for each in inputs if self._can_join(each)]
        joined.sort(key=lambda each: places.get(each.key, len(self._keys)))
        groups = [*([joined] if len(joined) > 1 else []), *self._prompt_groups(inputs)]
        for group in groups:
            compute = self._decode if group[0].start else self._prefill
            rows |= zip((each.key for each in group), compute(group), strict=True)
        found = []
        for each in inputs:
            if each.key in rows:
                found.append(rows[each.key][None][: each.num_logits])
            else:
                self._part_with(each.key)
                found.append(self._forward(each))
        return np.concatenate([row for row in found if len(row)] or [np.empty((0, self.vocab_size), np.float32)])

    def fork(self, forks: Sequence[Fork]) -> None:
        """See ``Runner.fork``."""
        for key, _, _ in forks:
            self._part_with(key)
        super().fork(forks)

    def save(self, key: int) -> SavedState | None:
        """See ``Runner.save``."""
        self._part_with(key)
        context, length = self._open.pop(key, (None, 0))
        if context is None:
            return None
        sizes: list[int] = []

        def measure(_: str, values: list[Any]) -> Any:
            if isinstance(values[0], torch.Tensor):
                sizes.append(values[0].nbytes)
            return values[0]

        walk([context.cache], measure)
        return SavedState(length, -(-sum(sizes) // (self.model.token_bytes * self.block_size)), context)

    def restore(self, key: int, saved: SavedState) -> None:
        """See ``Runner.restore``."""
        context = self.model.begin()
        context.token_ids = [*saved.state.token_ids]
        with torch.inference_mode():
            context.cache = self._merge([Part(saved.state.cache, [0], saved.length)])
        self._open[key] = context, saved.length

    def _can_join(self, each: ModelInput) -> bool:
        """Whether an input is one more token of a sequence with a cache, and not the first one with long positions."""
        context, length = self._open.get(each.key, (None, 0))
        limit = self.model.decoding.long_rope
        return context is not None and each.start == length == each.stop - 1 and not (limit and length >= limit)

    def _prompt_groups(self, inputs: Sequence[ModelInput]) -> list[list[ModelInput]]:
        """New sequences that are computed together: at most half of each is padding."""
        groups: list[list[ModelInput]] = []
        limit = self.model.decoding.long_rope
        for each in sorted(inputs, key=lambda each: each.stop) if self._joins_prompts else ():
            if each.start or each.key in self._prompts or each.num_logits > 1 or (limit and each.stop > limit):
                continue
            if groups and each.stop <= 2 * groups[-1][0].stop:
                groups[-1].append(each)
            else:
                groups.append([each])
        return [group for group in groups if len(group) > 1]

    def _prefill(self, inputs: Sequence[ModelInput]) -> NDArray[np.float32]:
        """The logits [B, V] after several prompts, in one forward pass."""
        total = inputs[-1].stop
        with torch.inference_mode():
            ids = [[0] * (total - each.stop) + [*each.token_ids[: each.stop]] for each in inputs]
            logits_BV, cache = self._step(ids, [total - each.stop for each in inputs], 0, None)
            for row, each in enumerate(inputs):
                context = self.model.begin()
                context.token_ids = [*each.token_ids[: each.stop]]
                context.cache = self._merge([Part(cache, [row], each.stop)])
                self._open[each.key] = context, each.stop
                self._prompts[each.key] = each.stop
        return logits_BV

    def _drop(self) -> None:
        self._keys: list[int] = []  # the sequences of the batch, by row
        self._lengths: list[int] = []
        self._cache: Any = None

    def _decode(self, inputs: Sequence[ModelInput]) -> NDArray[np.float32]:
        """The logits [B, V] of the new tokens of several sequences, in one forward pass."""
        opened = [self._open.pop(each.key) for each in inputs]  # removed, in case the forward pass raises
        keys, lengths = [each.key for each in inputs], [length for _, length in opened]
        with torch.inference_mode():
            same = keys == self._keys
            cache = self._cache if same else self._join(keys, lengths, [context for context, _ in opened])
            self._drop()
            ids = [[each.token_ids[each.start]] for each in inputs]
            logits_BV, cache = self._step(ids, [max(lengths) - length for length in lengths], max(lengths), cache)
        for each, (context, length) in zip(inputs, opened, strict=True):
            context.token_ids.append(each.token_ids[length])
            context.cache = None
            self._open[each.key] = context, length + 1
        self._keys, self._lengths, self._cache = keys, [length + 1 for length in lengths], cache
        return logits_BV

    def _step(
        self, ids: list[list[int]], hidden: list[int], before: int, cache: Any
    ) -> tuple[NDArray[np.float32], Any]:
        """More tokens [B, T] after ``before`` ones. hidden: how many padded tokens each sequence begins with."""
        decoding, device = self.model.decoding, self.model.model.device
        name, ids_BT = str(decoding.cache), torch.tensor(ids, device=device)
        hidden_B1 = torch.tensor(hidden, device=device)[:, None]
        settings: dict[str, Any] = {name: cache, "use_cache": True, "logits_to_keep": 1}
        columns_L = torch.arange(before + ids_BT.shape[1], device=device)
        if decoding.positions:
            settings["position_ids"] = (columns_L[before:] - hidden_B1).clamp(min=0)
        if any(hidden) and (self._masked or cache is None):
            settings["attention_mask"] = (columns_L >= hidden_B1).long()
        out = self.model.model(input_ids=ids_BT, **settings)
        logits: NDArray[np.float32] = out.logits[:, -1].float().cpu().numpy()
        return logits, out[name]

    def _join(self, keys: list[int], lengths: list[int], contexts: list[TransformersContext]) -> Any:
        """A cache whose rows are these sequences. Sequences of the batch that are not among them get their own."""
        for key in {*self._keys} - {*keys}:
            self._part_with(key)
        kept = [self._keys.index(key) for key in keys if key in self._keys]  # they come first
        parts = [Part(self._cache, kept, max(self._lengths[row] for row in kept))] if kept else []
        new = zip(lengths[len(kept) :], contexts[len(kept) :], strict=True)
        return self._merge([*parts, *(Part(context.cache, [0], length) for length, context in new)])

    def _part_with(self, key: int) -> None:
        """Give a sequence of the batch a cache of its own; the others stay."""
        if key not in self._keys or self._cache is None:
            return
        row = self._keys.index(key)
        if key in self._open:
            length = self._lengths[row]
            with torch.inference_mode():
                self._open[key][0].cache = self._merge([Part(self._cache, [row], length)])
        self._keys[row] = -1  # nobody's

    def _merge(self, parts: Sequence[Part]) -> Any:
        """The rows of some caches in a new one, without tokens that no row needs."""
        total = max(part.kept for part in parts)

        def merge(path: str, values: list[Any]) -> Any:
            if isinstance(values[0], torch.Tensor):
                return self._merged_tensor(path, values, parts)
            if path in self._counts:
                return total
            if any(value != values[0] for value in values):
                raise IncompatibleModelError(f"{path} of its cache depends on the sequence")
            return values[0]

        return walk([part.cache for part in parts], merge)

    def _merged_tensor(self, path: str, values: list[Any], parts: Sequence[Part]) -> Any:
        if path not in self._dimensions:
            return values[0].clone()
        dimension, rows = self._dimensions[path], []
        for value, part in zip(values, parts, strict=True):
            if part.rows != [*range(len(value))]:
                value = value[part.rows]
            if dimension is not None and value.shape[dimension] > part.kept:
                value = value.narrow(dimension, value.shape[dimension] - part.kept, part.kept)
            rows.append(value)
        if dimension is not None:
            size = max(value.shape[dimension] for value in rows)
            rows = [_padded(value, dimension, size) for value in rows]
        return torch.cat(rows)

    def _find_dimensions(self) -> None:
        """Which numbers and tensors of a cache depend on the number of tokens, and in which dimension."""
        self._dimensions: dict[str, int | None] = {}  # of tensors with a row per sequence
        self._counts: set[str] = set()  # of tokens
        caches: list[Any] = []
        for length in (1, 2):
            context = self.model.begin()
            context.forward(range(length))
            caches.append(context.cache)

        def compare(path: str, values: list[Any]) -> Any:
            one, two = values
            if isinstance(one, torch.Tensor) and one.dim() and len(one) == len(two) == 1:
                found = [
                    (i, *sizes)
                    for i, sizes in enumerate(zip(one.shape, two.shape, strict=True))
                    if sizes[0] != sizes[1]
                ]
                if found and [sizes for _, *sizes in found] != [[1, 2]]:
                    raise IncompatibleModelError(f"{path} of its cache has another size than the sequence")
                self._dimensions[path] = found[0][0] if found else None
            elif not isinstance(one, torch.Tensor) and one != two:
                if [one, two] != [1, 2]:
                    raise IncompatibleModelError(f"{path} of its cache depends on the sequence")
                self._counts.add(path)
            return one

        walk(caches, compare)
        self._masked = any(dimension is not None for dimension in self._dimensions.values())

    def _check(self) -> None:
        """Compare sequences that come and go with single ones. Raises IncompatibleModelError."""
        self._joins_prompts = True
        try:
            self._compare(((0, 1, 2), (0, 1, 2), (2, 0), (2, 0, 1)))
        except Exception:  # noqa: BLE001 - the model's code may raise anything
            self._joins_prompts = False
            self._compare(((0,), (1,), (0, 1), (2,), (0, 1, 2), (2, 0), (2, 0), (0,)))

    def _compare(self, steps: Sequence[Sequence[int]]) -> None:
        """steps: the sequences of each forward pass."""
        random = np.random.default_rng(0)
        ids = [random.integers(0, self.vocab_size, length + len(steps)).tolist() for length in LENGTHS]
        single, done = [self.model.begin() for _ in ids], [0 for _ in ids]
        try:
            for keys in steps:
                stops = [done[key] + 1 if done[key] else LENGTHS[key] for key in keys]
                places = [*zip(keys, [done[key] for key in keys], stops, strict=True)]
                actual_BV = self.forward([ModelInput(key, ids[key], start, stop, (), 1) for key, start, stop in places])
                expected_BV = np.stack([single[key].forward(ids[key][start:stop]) for key, start, stop in places])
                worst = deviation(actual_BV, expected_BV, self.model.model.dtype)
                if not worst <= TOLERANCE.get(self.model.model.dtype, 0):
                    raise IncompatibleModelError(f"in a padded batch, its logits differ by {worst:.1%}")
                for key, _, stop in places:
                    done[key] = stop
        finally:
            self._drop()
            for key in range(len(ids)):
                self.forget(key)


def _padded(value: Any, dimension: int, size: int) -> Any:
    """Zeros before the first token."""
    shape = [*value.shape]
    shape[dimension] = size - shape[dimension]
    return torch.cat([value.new_zeros(shape), value], dimension) if shape[dimension] else value


def walk(values: list[Any], merge: Callable[[str, list[Any]], Any], path: str = "") -> Any:
    """A copy of objects of the same structure, with what ``merge`` makes of the tensors and plain values at each path.

    Raises IncompatibleModelError.
    """
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise IncompatibleModelError(f"{path} of its cache has different types")
    if isinstance(first, (torch.Tensor, *SIMPLE)):
        return merge(path, values)
    if isinstance(first, list | tuple):
        if any(len(value) != len(first) for value in values):
            raise IncompatibleModelError(f"{path} of its cache has different lengths")
        return type(first)(walk([*each], merge, f"{path}[{i}]") for i, each in enumerate(zip(*values, strict=True)))
    if isinstance(first, dict):
        return {key: walk([value[key] for value in values], merge, f"{path}[{key}]") for key in first}
    if hasattr(first, "__dict__"):
        copied = copy.copy(first)
        for name in vars(first):
            setattr(copied, name, walk([getattr(value, name) for value in values], merge, f"{path}.{name}"))
        return copied
    raise IncompatibleModelError(f"{path} of its cache has an unknown type, {type(first).__name__}")
