"""nucleate inside vLLM: a logits processor that samples, and allows the sampled token alone.

vLLM finds it by the entry point ``vllm.logits_processors``, in both of its model runners. A request uses it if
``extra_args`` has "nucleate": fields of SamplingParams, as an object, or as JSON where the values must be plain (the
HTTP field ``vllm_xargs``). Other requests do not change.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor as FirstInterface
from vllm.v1.sample.logits_processor import MoveDirectionality

from nucleate.integrations.engine_rows import (
    FIELD,
    FOLLOWING,
    PENALTIES,
    EngineRows,
    allow_only,
    request_params,
    seed_of_text,
)
from nucleate.llm.model_loading import load_sampler
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import SamplingParams

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SecondInterface
except ImportError:  # vLLM before 0.33, which loads this plug-in too if nucleate is installed

    class SecondInterface:  # type: ignore[no-redef]
        """Its second model runner has no interface."""


logger = logging.getLogger("nucleate")

WHERE = f"extra_args[{FIELD!r}]"


def params_of(sampling_params: Any) -> SamplingParams | None:
    """The parameters that a request gives to nucleate; None if it gives none. Raises ParameterError."""
    given = (sampling_params.extra_args or {}).get(FIELD)
    if given is None:
        return None
    engine = {name: getattr(sampling_params, name) for name in (*FOLLOWING, *PENALTIES)}
    engine |= {"top_k": max(engine["top_k"], 0)}  # -1 means all tokens, too
    params = request_params(given, engine, WHERE)
    if sampling_params.n > 1 and engine["seed"] is None and params.seed is not None:
        message = f"seed cannot be in {WHERE} with n = {sampling_params.n}, as all outputs would be the same"
        raise ParameterError("seed", f"{message}: set vLLM's seed, of which output i uses seed + i")
    return params


class NucleateLogitsProcessor(SecondInterface, FirstInterface):
    """Samples the requests that have ``extra_args["nucleate"]``, with the tokens of ``LLM``, seed for seed.

    vLLM creates it. vllm_config: its configuration; the defaults of parameters are those of the model, unless vLLM runs
    with ``generation_config="vllm"``. runner: what the model runner passes: the state of its requests, or the device
    and whether memory is pinned. The logits are copied to the CPU, where nucleate samples.
    """

    def __init__(self, vllm_config: Any, *runner: Any) -> None:
        self._config = vllm_config
        self._requests: Any = runner[0] if len(runner) == 1 else None
        self._added = 0  # requests so far, the same on all ranks
        self._new: dict[int, SamplingParams] = {}  # of the second interface: slots whose tokens are not there yet
        self._prompts: dict[int, int] = {}  # likewise: lengths of the prompts by slot
        self._outputs: dict[int, list[int]] = {}  # of the first interface: the growing outputs by place in the batch

    @cached_property
    def _rows(self) -> EngineRows:
        model = self._config.model_config
        config = "none" if getattr(model, "generation_config", "auto") == "vllm" else "auto"
        size, tokenizer = model.get_vocab_size(), getattr(model, "tokenizer", None)
        tokenizer = None if tokenizer == model.model else tokenizer
        revision = getattr(model, "revision", None)
        own = load_sampler(
            model.model, vocab_size=size, generation_config=config, tokenizer=tokenizer, revision=revision
        )
        return EngineRows(own)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Check the parameters of a request, before it is admitted.

        sampling_params: vLLM's. Raises ParameterError, a ValueError that names the field and what is allowed.
        """
        params_of(sampling_params)

    def _start(self, key: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> bool:
        """Begin a request. Returns False for one that does not fit the model: an error here would end the engine."""
        self._added += 1
        seed = seed_of_text(getattr(self._config, "instance_id", ""), self._added)
        try:
            self._rows.start(key, params, prompt, output, seed)
        except ValueError as error:
            logger.error("a request is sampled by vLLM: %s", error)  # noqa: TRY400  # the message says it
            return False
        return True

    # The first interface: requests are places in the batch, and their outputs are lists that grow.

    def is_argmax_invariant(self) -> bool:
        """False: it also selects the tokens of requests that vLLM samples greedily."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the changes of the batch. batch_update: requests removed, added and moved, in this order, or None."""
        if batch_update is None:
            return
        for place in batch_update.removed:
            self._outputs.pop(place, None)
            self._rows_leave(place)
        for place, sampling_params, prompt, output in batch_update.added:
            self._outputs.pop(place, None)
            self._rows_leave(place)
            params = params_of(sampling_params)
            known = [token for token in output if token >= 0]
            if params is not None and self._start(place, params, prompt or (), known):
                self._outputs[place] = output
        for source, target, direction in batch_update.moved:
            if not self._outputs.keys() & {source, target}:
                continue
            swap = direction == MoveDirectionality.SWAP
            self._rows.move({target: source, **({source: target} if swap else {})})
            ours, theirs = self._outputs.pop(source, None), self._outputs.pop(target, None)
            moved = {target: ours, source: theirs if swap else None}
            self._outputs |= {place: output for place, output in moved.items() if output is not None}

    def _rows_leave(self, key: int) -> None:
        if "_rows" in self.__dict__:  # no model is loaded for requests without parameters of nucleate
            self._rows.leave(key)

    # The second interface: requests are slots, and their tokens are on the device.

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Begin a request. req_idx: its slot. sampling_params: vLLM's. Returns whether nucleate samples it."""
        self._rows_leave(req_idx)
        self._new.pop(req_idx, None)
        params = params_of(sampling_params)
        if params is not None:
            self._new[req_idx] = params
        return params is not None

    def apply_staged_writes(self) -> None:
        """Read the tokens of new requests, which are on the device now."""
        requests, new, self._new = self._requests, self._new, {}
        for slot, params in new.items():
            prompt, total = int(requests.prompt_len.np[slot]), int(requests.prefill_len.np[slot])
            tokens = requests.all_token_ids.gpu[slot, :total].tolist()
            self._prompts[slot] = prompt
            self._start(slot, params, tokens[:prompt], tokens[prompt:])

    def apply(self, logits: Any, ctx: Any = None) -> Any:
        """Sample, and allow the sampled tokens alone. logits: float [rows, V], changed in place. ctx: the rows."""
        if "_rows" not in self.__dict__ or not len(self._rows):
            return logits
        if ctx is not None and not any(slot in self._rows for slot in ctx.idx_mapping_np.tolist()):
            return logits  # without waiting for the device
        places, drafts = self._places_of(ctx) if ctx is not None else self._places()
        size = self._rows.sampler.vocab_size
        allow_only(logits, self._rows.sample(logits[:, :size], places, drafts))
        return logits

    def _places(self) -> tuple[dict[Any, list[int]], dict[Any, list[int]] | None]:
        """The rows of logits of each request in the first interface. An output may end with -1, which comes later."""
        for place, output in self._outputs.items():
            recent = max(self._rows.length(place) - 8, 0)
            self._rows.follow(place, len(output), output[recent:], recent)
        return {place: [place] for place in self._outputs}, None

    def _places_of(self, ctx: Any) -> tuple[dict[Any, list[int]], dict[Any, list[int]]]:
        """The rows of logits of each request in the second interface, and its drafts.

        A request that still reads its prompt has a row, but gets no token.
        """
        slots, positions, inputs = ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist(), ctx.input_ids.tolist()
        places, drafts = dict[Any, list[int]](), dict[Any, list[int]]()
        requests = self._requests
        for slot, group in groupby(range(len(slots)), slots.__getitem__):
            rows = [*group]
            if slot not in self._rows or positions[rows[0]] + 1 < requests.prefill_len.np[slot]:
                continue
            length = positions[rows[0]] + 1 - self._prompts[slot]
            start = max(min(length, self._rows.length(slot)) - len(rows) - 8, 0)
            begin = self._prompts[slot] + start
            tokens = requests.all_token_ids.gpu[slot, begin : self._prompts[slot] + length].tolist()
            self._rows.follow(slot, length, tokens, start)
            places[slot], drafts[slot] = rows, [inputs[row] for row in rows[1:]]
        return places, drafts
