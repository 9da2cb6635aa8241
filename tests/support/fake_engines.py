"""Fake model runners that make the calls which vLLM and SGLang document, around the embedded model.

Slots are reused, rows change their order, prompts are read in chunks, requests are preempted, and drafts are verified.
"""

from __future__ import annotations

import weakref
from array import array
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import nucleate as nc

NAN = "nan"


@lru_cache(maxsize=1)
def llm() -> nc.LLM:
    return nc.LLM()


@lru_cache(maxsize=4096)
def logits_after(tokens: tuple[int, ...]) -> Any:
    """The logits [V] of the embedded model after some tokens."""
    return llm().model.begin().forward(tokens)


def expected(prompt: list[int], fields: dict[str, Any], count: int) -> list[int]:
    """The tokens of LLM."""
    [completion] = llm().generate([prompt], nc.SamplingParams(**fields, max_tokens=count, ignore_eos=True))
    return list(completion.token_ids)


@dataclass
class FakeRequest:
    """A request. params: the engine's. count: of output tokens."""

    name: str
    prompt: list[int]
    params: Any
    count: int = 12
    output: list[int] = field(default_factory=list)
    computed: int = 0
    place: int | None = None
    arrives: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class SecondRunner:
    """vLLM's second model runner: slots, tokens on the device, rows of logits per draft token."""

    def __init__(self, adapter: Any, config: Any, rng: Any, *, slots: int = 3, chunk: int = 5, drafts: int = 0) -> None:
        self.rng, self.chunk, self.drafts, self.free = rng, chunk, drafts, list(range(slots))
        size = config.model_config.get_vocab_size()
        self.states = SimpleNamespace(
            device=torch.device("cpu"),
            max_num_reqs=slots,
            vocab_size=size,
            all_token_ids=SimpleNamespace(gpu=torch.full((slots, 256), -7, dtype=torch.int32)),
            prompt_len=SimpleNamespace(np=np.zeros(slots, np.int32)),
            prefill_len=SimpleNamespace(np=np.zeros(slots, np.int32)),
            total_len=SimpleNamespace(gpu=torch.zeros(slots, dtype=torch.int32)),
        )
        self.processor = adapter.NucleateLogitsProcessor(config, self.states)
        self.oracle: dict[str, list[int]] = {}

    def run(self, requests: list[FakeRequest]) -> None:
        waiting, running, step = list(requests), [], 0
        while waiting or running:
            step += 1
            if running and self.rng.random() < 0.15:  # preempted: the slot is free, and another request may take it
                victim = running.pop(int(self.rng.integers(len(running))))
                self._free(victim)
                waiting.insert(int(self.rng.integers(len(waiting) + 1)), victim)
            for request in [one for one in waiting if one.arrives <= step]:
                if not self.free:
                    break
                waiting.remove(request)
                running.append(request)
                self._admit(request)
            self.processor.apply_staged_writes()
            if running:
                self._step(running)
            for request in [one for one in running if len(one.output) >= one.count]:
                running.remove(request)
                self._free(request)

    def _admit(self, request: FakeRequest) -> None:
        slot = self.free.pop(int(self.rng.integers(len(self.free))))
        request.place, request.computed, tokens = slot, 0, request.tokens
        self.states.prompt_len.np[slot], self.states.prefill_len.np[slot] = len(request.prompt), len(tokens)
        self.states.all_token_ids.gpu[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        ours = self.processor.add_request(slot, request.params)
        assert ours == ("nucleate" in (request.params.extra_args or {}))

    def _free(self, request: FakeRequest) -> None:
        self.free.append(request.place)
        request.place = None

    def _step(self, running: list[FakeRequest]) -> None:
        order = [running[at] for at in self.rng.permutation(len(running))]
        rows, slots, local, inputs, positions, drafts = [], [], [], [], [], {}
        for request in order:
            total = len(request.tokens)
            done = min(request.computed + self.chunk, total)
            is_decode = request.computed >= len(request.prompt) and done == total
            drafts[request.name] = self._draft(request) if is_decode else []
            for offset in range(len(drafts[request.name]) + 1):
                seen = (request.tokens + drafts[request.name])[: done + offset]
                rows.append(logits_after(tuple(seen)))
                (
                    slots.append(request.place),
                    local.append(offset),
                    inputs.append(seen[-1]),
                    positions.append(len(seen) - 1),
                )
            request.computed = done
        logits = torch.from_numpy(np.stack(rows).copy())
        before = logits.clone()
        ctx = SimpleNamespace(
            expanded_idx_mapping=torch.tensor(slots),
            idx_mapping=torch.tensor([one.place for one in order]),
            idx_mapping_np=np.array([one.place for one in order]),
            expanded_local_pos=torch.tensor(local),
            input_ids=torch.tensor(inputs),
            pos=torch.tensor(positions),
            seq_lens_upper_bound_np=np.array([0] * len(order)),
        )
        logits = self.processor.apply(logits, ctx)
        at = 0
        for request in order:
            own = range(at, at + len(drafts[request.name]) + 1)
            at = own.stop
            if "nucleate" not in (request.params.extra_args or {}):
                assert torch.equal(logits[own.start : own.stop], before[own.start : own.stop])
            if request.computed < len(request.tokens):
                continue  # the prompt is not complete: no token
            for row, draft in zip(own, [*drafts[request.name], None], strict=True):
                token = int(logits[row].argmax())
                self._append(request, token)
                if token != draft or len(request.output) >= request.count:
                    break
            request.computed = len(request.tokens) - 1

    def _draft(self, request: FakeRequest) -> list[int]:
        """Right tokens for a while, then wrong ones."""
        future = self.oracle.get(request.name, [])[len(request.output) :]
        count = int(self.rng.integers(self.drafts + 1))
        right = int(self.rng.integers(count + 1))
        return (future[:right] + self.rng.integers(5, 4000, count).tolist())[:count]

    def _append(self, request: FakeRequest, token: int) -> None:
        request.output.append(token)
        self.states.all_token_ids.gpu[request.place, len(request.tokens) - 1] = token


class FirstRunner:
    """vLLM's first model runner: a dense batch, and updates of what was removed, added and moved."""

    def __init__(self, adapter: Any, config: Any, rng: Any, interface: Any, *, places: int = 3, chunk: int = 5) -> None:
        self.rng, self.places, self.chunk, self.interface = rng, places, chunk, interface
        self.processor = adapter.NucleateLogitsProcessor(config, torch.device("cpu"), False)
        assert not self.processor.is_argmax_invariant()

    def run(self, requests: list[FakeRequest]) -> None:
        waiting, batch = list(requests), []
        one_way, swap = self.interface.MoveDirectionality
        while waiting or batch:
            removed, added, moved = [], [], []
            for place, request in reversed([*enumerate(batch)]):
                preempted = self.rng.random() < 0.1
                if len(request.output) >= request.count or preempted:
                    removed.append(place)
                    if len(request.output) < request.count:
                        waiting.append(request)
            slots: dict[int, FakeRequest] = {at: one for at, one in enumerate(batch) if at not in removed}
            free = [at for at in range(self.places) if at not in slots]
            while waiting and free:
                at, request = free.pop(0), waiting.pop(0)
                if at in removed:
                    removed.remove(at)  # replaced by the added request
                slots[at], request.computed = request, 0
                added.append((at, request.params, request.prompt, request.output))
            while slots and max(slots) >= len(slots):  # condense
                hole = next(at for at in range(len(slots)) if at not in slots)
                moved.append((max(slots), hole, one_way))
                slots[hole] = slots.pop(max(slots))
            if len(slots) > 1 and self.rng.random() < 0.4:
                first, second = (int(at) for at in self.rng.choice(len(slots), 2, replace=False))
                moved.append((first, second, swap))
                slots[first], slots[second] = slots[second], slots[first]
            batch = [slots[at] for at in range(len(slots))]
            update = self.interface.BatchUpdate(len(batch), removed, added, moved)
            self.processor.update_state(update if removed or added or moved else None)
            if batch:
                self._step(batch)

    def _step(self, batch: list[FakeRequest]) -> None:
        for request in batch:
            request.computed = min(request.computed + self.chunk, len(request.tokens))
        logits = torch.from_numpy(np.stack([logits_after(tuple(one.tokens[: one.computed])) for one in batch]).copy())
        before = logits.clone()
        logits = self.processor.apply(logits)
        for place, request in enumerate(batch):
            if "nucleate" not in (request.params.extra_args or {}):
                assert torch.equal(logits[place], before[place])
            if request.computed == len(request.tokens):  # otherwise the token is discarded
                request.output.append(int(logits[place].argmax()))


class SGLangRequest:
    """SGLang's Req, as custom logit processors see it. It dies when nothing refers to it."""

    def __init__(self, rid: str, prompt: list[int], params: Any) -> None:
        self.rid, self.origin_input_ids, self.output_ids = rid, array("q", prompt), array("q")
        self.sampling_params, self.decode_batch_idx, self.computed, self.prefill = params, 0, 0, 0
        if isinstance(params.custom_params, dict):
            params.custom_params = params.custom_params | {"__req__": weakref.proxy(self)}


class SGLangRunner:
    """SGLang's scheduler: one call of a new processor per step; with overlap, outputs are known one step later."""

    def __init__(self, adapter: Any, rng: Any, *, chunk: int = 5, overlap: bool = False, drafts: int = 0) -> None:
        self.rng, self.chunk, self.overlap, self.drafts = rng, chunk, overlap, drafts
        self.text, self.base = adapter.NucleateLogitProcessor.to_str(), adapter.CustomLogitProcessor
        self.oracle: dict[str, list[int]] = {}
        self.fresh: set[str] = set()  # requests that got a token in the last step

    def run(self, given: list[FakeRequest]) -> None:
        requests = {}
        for one in given:
            requests[one.name] = SGLangRequest(one.name, one.prompt, one.params)
        real: dict[str, list[int]] = {one.name: one.output for one in given}
        counts, waiting, running = {one.name: one.count for one in given}, [*requests], []
        while waiting or running:
            self._deliver(requests, real, running, late=self.overlap)
            for name in [name for name in running if len(real[name]) >= counts[name]]:
                running.remove(name)
                del requests[name]
            if len(running) > 1 and self.rng.random() < 0.1:  # retracted
                name = running.pop()
                self._deliver(requests, real, [name], late=False)
                requests[name].computed = requests[name].decode_batch_idx = 0
                waiting.insert(0, name)
            while waiting and len(running) < 3:
                running.append(waiting.pop(0))
            self.rng.shuffle(running)
            if running:
                self._step([(name, requests[name]) for name in running], real)

    def _deliver(self, requests: Any, real: Any, names: list[str], *, late: bool) -> None:
        for name in names:
            known = real[name][: len(real[name]) - (late and name in self.fresh)]
            requests[name].output_ids = array("q", known)

    def _step(self, batch: list[Any], real: dict[str, list[int]]) -> None:
        per_request = 1 + self.drafts
        rows, drafted = [], {}
        for name, one in batch:
            tokens = [*one.origin_input_ids, *real[name]]
            if not one.computed:
                one.prefill = len(tokens)
            if one.computed < one.prefill:
                one.computed = min(one.computed + self.chunk, one.prefill)
            else:
                one.computed, one.decode_batch_idx = len(tokens), one.decode_batch_idx + 1
            future = self.oracle.get(name, [])[len(real[name]) :]
            right = int(self.rng.integers(self.drafts + 1))
            drafted[name] = (future[:right] + self.rng.integers(5, 4000, self.drafts).tolist())[: self.drafts]
            for depth in range(per_request):
                rows.append(logits_after(tuple(tokens[: one.computed] + drafted[name][:depth])))
        logits = torch.from_numpy(np.stack(rows).copy())
        params = [one.sampling_params.custom_params for _, one in batch for _ in range(per_request)]
        out = self.base.from_str(self.text)(logits, params)
        assert out.shape == logits.shape
        self.fresh = set()
        for place, (name, one) in enumerate(batch):
            if one.computed < len(one.origin_input_ids) + len(real[name]):
                continue
            for depth, draft in enumerate([*drafted[name], None]):
                token = int(out[place * per_request + depth].argmax())
                real[name].append(token)
                self.fresh.add(name)
                if token != draft:
                    break
