"""Drafts by the multi-token prediction (MTP) modules of a model (DeepSeek-V3, arXiv 2412.19437).

From what the target made of a token and the token after it, the first module guesses what follows, the second one goes
on from what the first one gave, and so on. After the last module, it goes on from its own output, as EAGLE does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nucleate.models.protocol import ModelError
from nucleate.models.runner import BLOCK, ModelInput
from nucleate.models.transformers.mtp_module import MtpModules
from nucleate.speculative.draft import Draft, DraftContext, Proposer, TargetOutput
from nucleate.speculative.proposers.neural.chain_builder import ChainBuilder, drafts_of
from nucleate.speculative.proposers.neural.draft_sampling import draw
from nucleate.speculative.proposers.neural.hidden_states import CapturedHiddenStates
from nucleate.speculative.proposers.neural.kv_slots import KVSlots

MEMORY = 256 << 20
"""Bytes of KV cache."""


class Mtp(Proposer):
    """See ``Proposer``. memory: bytes of KV cache; sequences that do not fit get no drafts for a while."""

    def __init__(self, modules: MtpModules, memory: int = MEMORY) -> None:
        self._modules, self.layers = modules, (modules.depth,)
        size = sum(pool.size for pool in modules.new_pools(1))
        if memory < size:
            raise ModelError(f"{memory} bytes for keys and values hold no block of {size}: give more")
        self._pools, self._rooms = modules.new_pools(memory // size), KVSlots(memory // size, BLOCK)
        self._heard: dict[int, CapturedHiddenStates] = {}

    def propose(self, states: Sequence[DraftContext], counts: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``. None for a sequence whose last tokens' hidden states are not known."""
        chains = [ChainBuilder(state, count) for state, count in zip(states, counts, strict=True)]
        keys = [state.key for state in states]
        going = [chain for chain in chains if chain.count > 0 and self._begin(chain, keys)]
        if going:
            self._draft(going)
        return drafts_of(chains)

    def _begin(self, chain: ChainBuilder, keys: list[int]) -> bool:
        """Whether all but the last token of a sequence are known, and there is room for them and for its draft."""
        state, heard = chain.state, self._heard.get(chain.state.key)
        if heard is None or not heard.count or heard.stop != len(state.token_ids) - 1:
            return False
        more = max(0, chain.count - self._modules.count)
        for key in self._rooms.room(state.key, heard.count + more, keys):
            self._heard.pop(key, None)
        chain.ids = [*state.token_ids]
        return state.key in self._heard

    def _draft(self, going: list[ChainBuilder]) -> None:
        x_RX = self._take_in(going)
        last, place = self._modules.count - 1, self._modules.count
        while True:
            stays = [row for row, chain in enumerate(going) if len(chain.tokens) < chain.count]
            if not stays:
                return
            going = [going[row] for row in stays]
            places = [self._heard[chain.state.key].count + place - self._modules.count for chain in going]
            x_RX = self._run(going, last, x_RX[stays], [(at, at + 1) for at in places])[1]
            self._guess(going, x_RX, place)
            place += 1

    def _take_in(self, going: list[ChainBuilder]) -> Any:
        """Each module reads what is new to it, and guesses a token; what the last one gives at the ends, [R, X].

        They all do, however few tokens are wanted: so the keys and values of one are not behind those of another. The
        last ones of all but the first module were of guessed tokens in the round before, and are read again.
        """
        found = [self._heard[chain.state.key] for chain in going]
        again = self._modules.count - 1
        spans = [(max(0, min(heard.taken - again, heard.count - 1)), heard.count) for heard in found]
        watched = [heard.states(start) for heard, (start, _) in zip(found, spans, strict=True)]
        x_TX = x_RX = self._modules.hidden(self._modules.joined(watched))
        for place in range(self._modules.count):
            x_TX, x_RX = self._run(going, place, x_TX, spans)
            self._guess(going, x_RX, place)
        for heard in found:
            heard.take(max(1, again))
        return x_RX

    def _run(self, going: list[ChainBuilder], place: int, x_TX: Any, spans: list[tuple[int, int]]) -> tuple[Any, Any]:
        """What a module gives at some places of each sequence, and at the last one of each; see ``MtpModules.run``."""
        keys = [chain.state.key for chain in going]
        bases = [self._heard[key].base for key in keys]
        parts = [
            ModelInput(key, chain.ids[base + place + 1 :], *span, self._rooms.tables[key], 1)
            for chain, key, base, span in zip(going, keys, bases, spans, strict=True)
        ]
        return self._modules.run(place, x_TX, parts, bases, self._pools[place])

    def _guess(self, going: list[ChainBuilder], x_RX: Any, place: int) -> None:
        """A token for each sequence. It is read by the next module, if it is wanted or not."""
        drawn = draw(self._modules.logits(x_RX), [chain.state for chain in going], [place] * len(going))
        for chain, one in zip(going, drawn, strict=True):
            chain.add(one)
            chain.ids.append(max(0, one.token))
            if one.token < 0:
                chain.count = len(chain.tokens)  # nothing can follow

    def observe(self, readings: Sequence[TargetOutput]) -> None:
        """See ``Proposer.observe``."""
        for read in readings:
            self._heard.setdefault(read.key, CapturedHiddenStates(self._modules.own, self._modules.joined)).add(read)

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """See ``Proposer.forget``. Nothing is learned."""
        self._heard.pop(key, None)
        self._rooms.leave(key)
