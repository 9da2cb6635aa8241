"""Multi-token prediction (MTP) modules of a Transformers model: loaded, batched and checked.

A module makes of the hidden state of a token and of a token after it what the model may make of that one: DeepSeek-V3
(arXiv 2412.19437, 2.2). What a module is, Transformers says (``MtpModel``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers.modeling_layers import MtpModel

from nucleate.models.protocol import ModelError
from nucleate.models.runner import BLOCK, ModelInput
from nucleate.models.transformers.attention_interface import MASKS, NAME, PROBE, implement, paged_copy
from nucleate.models.transformers.batched_model import has_kernel, new_layer_cache
from nucleate.models.transformers.compatibility import LENGTH, TOLERANCE, WINDOW, Probe
from nucleate.models.transformers.hidden_state_capture import HiddenStateCapture, decoder_layers
from nucleate.models.transformers.ragged_attention import (
    AttentionLayer,
    AttentionPlan,
    IncompatibleModelError,
    LayerCache,
)
from nucleate.models.transformers.transformers_model import TransformersModel
from nucleate.parameters.converters import one_line


class MtpModules:
    """The MTP modules of a model, run batched. Raises ModelError if that is not possible.

    Of a sequence, module m reads at its place j the hidden state of token j, as the final norm or the module before it
    gave it, and token j + m + 1; what it makes of them, the model's head turns into the logits of token j + m + 2.
    """

    def __init__(self, model: TransformersModel, modules: Any) -> None:
        self.count: int = len(modules.layers)
        self.depth = len(decoder_layers(model.model))  #: the layer to pass to ``Runner.capture_hidden_states``
        self.device, self.dtype = model.model.device, model.model.dtype
        self.compiled = has_kernel(self.device, self.dtype)
        try:
            self._norm = model.model.get_decoder().norm
            self._model = paged_copy(modules.eval())
            with torch.inference_mode():
                self.layers = [self._probe(place) for place in range(self.count)]
                _compare(self, modules, model)
        except ModelError as error:
            raise ModelError(f"the modules that the model brings cannot be run: {error}") from error
        except Exception as error:  # whatever a model does with what it does not expect
            why = f"{type(error).__name__}: {one_line(error)}"
            raise ModelError(f"the modules that the model brings cannot be run: {why}") from error

    def new_pools(self, blocks: int) -> list[LayerCache]:
        """Create the KV cache of each module, in blocks of BLOCK tokens."""
        return [new_layer_cache(layer, blocks, BLOCK, self.device, self.dtype) for layer in self.layers]

    def own(self, watched_TX: Any) -> Any:
        """A copy of a runner's hidden states, on the device and in the dtype of the modules."""
        return torch.as_tensor(watched_TX).to(self.device, self.dtype, copy=True)

    def joined(self, pieces: Sequence[Any]) -> Any:
        """Some of these one after the other."""
        return pieces[0] if len(pieces) == 1 else torch.cat([*pieces])

    def hidden(self, watched_TX: Any) -> Any:
        """What the first module reads of the states that the final norm does."""
        with torch.inference_mode():
            return self._norm(watched_TX)

    def run(
        self, place: int, x_TX: Any, parts: Sequence[ModelInput], bases: Sequence[int], pool: LayerCache
    ) -> tuple[Any, Any]:
        """What a module gives [T, X], and of it what it gives at the end of each part [P, X].

        The tokens of a part are those from the second that the module reads on; its places are counted from ``bases``,
        which is where in the sequence the states that the module was ever given begin.
        """
        with torch.inference_mode():
            plan = AttentionPlan(parts, BLOCK, [self.layers[place]], [pool], self.compiled, self.device)
            counts = [part.stop - part.start for part in parts]
            shift_T = torch.from_numpy(np.repeat(np.asarray(bases, np.int64) + place + 1, counts)).to(self.device)
            out_TX = self._call(place, x_TX, plan.ids_T, plan.positions_T + shift_T, plan)
            return out_TX, out_TX[plan.logits_indices]

    def logits(self, x_RX: Any) -> Any:
        """Float32 NumPy [R, V] of what a module gave."""
        with torch.inference_mode():
            return self._model._project_to_logits(x_RX[None])[0].float().cpu().numpy()  # noqa: SLF001 - as it does

    def _call(self, place: int, x_TX: Any, ids_T: Any, positions_T: Any, plan: Any) -> Any:
        given = x_TX[None], positions_T[None], None
        return self._model.forward_layer(place, *given, input_ids=ids_T[None], nucleate=plan)[0]

    def _probe(self, place: int) -> AttentionLayer:
        """The attention settings of a module."""
        probe, token = Probe(), MASKS.set([])
        implement(self._model, PROBE)
        try:
            x_TX = torch.zeros((1, self._model.config.hidden_size), dtype=self.dtype, device=self.device)
            id_T = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._call(place, x_TX, id_T, id_T, probe)
            if any(own for own, _ in MASKS.get()):
                raise IncompatibleModelError("their attention has a custom mask")
        finally:
            MASKS.reset(token)
            implement(self._model, NAME)
        if len(probe.layers) != 1:
            raise IncompatibleModelError(f"a module attends {len(probe.layers)} times")
        return probe.layers[0]


_brought: WeakKeyDictionary[Any, MtpModules] = WeakKeyDictionary()


def brought(model: TransformersModel) -> MtpModules:
    """The MTP modules of a model with ``num_mtp_layers`` in its config, loaded once. Raises ModelError."""
    if model.model not in _brought:
        _brought[model.model] = MtpModules(model, _loaded(model.model))
    return _brought[model.model]


def _loaded(model: Any) -> Any:
    folder = model.config.name_or_path
    if not folder or not Path(folder).is_dir():
        raise ModelError("the modules for multi-token prediction are in the folder of a model, and this one has none")
    try:
        return MtpModel.from_pretrained(model, device_map={"": model.device})
    except Exception as error:  # of torch, transformers, safetensors
        why = one_line(error)
        raise ModelError(f"cannot load the modules for multi-token prediction in {folder}: {why}") from error


def _compare(ours: MtpModules, modules: Any, model: TransformersModel) -> None:
    """Compare two sequences computed in a batch, in chunks, with Transformers. Raises IncompatibleModelError."""
    windows = [layer.rule.window for layer in ours.layers if 0 < layer.rule.window <= WINDOW]
    length = min(max([LENGTH, *(window + LENGTH for window in windows)]), model.context_length - ours.count - 1)
    if length < 4:
        raise IncompatibleModelError(f"the context of {model.context_length} tokens is too short to try them")
    ids_2T = np.random.default_rng(0).integers(0, model.vocab_size, (2, length + ours.count + 1))
    ids = torch.from_numpy(ids_2T).to(ours.device)
    stock, states = _last_states(ours, model, ids[:, :length])
    count = -(-length // BLOCK)
    blocks, pools = [list(range(2 * count))[::-2], list(range(2 * count))[::2]], ours.new_pools(2 * count)
    third, positions = length // 3, torch.arange(length, device=ours.device)[None]
    for place in range(ours.count):
        later = ids[:, place + 1 : place + 1 + length]
        stock = [
            modules.forward_layer(place, x, positions + place + 1, None, input_ids=row[None])
            for x, row in zip(stock, later, strict=True)
        ]
        made: list[list[Any]] = [[], []]
        for parts in (  # (sequence, start, stop) that are read together
            ((0, 0, third), (1, 0, length - 2)),
            ((1, length - 2, length - 1), (0, third, length - 1)),
            ((0, length - 1, length), (1, length - 1, length)),
        ):
            given = [ModelInput(row, later[row].tolist(), start, stop, blocks[row], 1) for row, start, stop in parts]
            x_TX = torch.cat([states[row][start:stop] for row, start, stop in parts])
            out_TX, _ = ours.run(place, x_TX, given, [0, 0], pools[place])
            for (row, _, _), piece in zip(parts, out_TX.split([s - f for _, f, s in parts]), strict=True):
                made[row].append(piece)
        states = [torch.cat(pieces) for pieces in made]
        off = max(_off(mine, other[0], ours.dtype) for mine, other in zip(states, stock, strict=True))
        if not off <= TOLERANCE.get(ours.dtype, 0):
            raise IncompatibleModelError(f"packed, what they give is {off:.1%} off")


def _last_states(ours: MtpModules, model: TransformersModel, ids_2T: Any) -> tuple[list[Any], list[Any]]:
    """What the first module reads of each row: as Transformers tells [1, T, X], and as one who watches [T, X]."""
    watcher = HiddenStateCapture(model.model, (ours.depth,))
    stock, states = [], []
    try:
        for row in ids_2T:
            out = model.model(input_ids=row[None], use_cache=False, output_hidden_states=True)
            stock.append(out.hidden_states[-1])
            states.append(ours.hidden(ours.own(watcher.take())))
    finally:
        watcher.close()
    return stock, states


def _off(ours_TX: Any, stock_TX: Any, dtype: Any) -> float:
    """How far states are from others, as a part of how long those are: the worst, or of short types three quarters."""
    off_T = (ours_TX.float() - stock_TX.float()).norm(dim=-1) / stock_TX.float().norm(dim=-1).mean()
    share = 0.75 if dtype.itemsize == 2 else 1.0  # rounding sends some tokens to other experts
    return float(off_T.quantile(share, interpolation="lower"))
