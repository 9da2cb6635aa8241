"""What a model is to the engine: it reads tokens of many sequences in one forward. Knows no requests and no sampling.

Keys and values lie in *blocks* of ``block_size`` tokens, which the engine deals out: a sequence's token at position p
is in its block p // block_size. Two sequences that begin alike may have the same blocks there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nucleate.models.protocol import DecodingContext, Model, ModelError

BLOCK = 16
"""Tokens per block, where a model has no reason for another size."""


class ModelInput(NamedTuple):
    """What one sequence has read in a forward."""

    key: int  #: of the sequence; never used for another one
    token_ids: Sequence[int]  #: all of the sequence as of now, prompt and output
    start: int  #: it reads token_ids[start:stop]; what is before has been read
    stop: int
    blocks: Sequence[int]  #: at least ceil(stop / block_size)
    logits: int  #: of how many of the last tokens it reads the logits are wanted; 0 to stop - start
    parents: Sequence[int] | None = None
    """Of its last tokens, if they are a tree: for each the place in the tree of the one it follows, -1 for the token
    before the tree; an earlier one in any case. A token of a tree sees what is before the tree, what leads to it, and
    itself; its position is that of its depth. Keys and values lie in the order of the list. Tokens of the tree before
    ``start`` were read before. Only with ``tree_attention``.
    """


class Fork(NamedTuple):
    """A new sequence that begins with all that another one has read."""

    key: int  #: of that one
    child: int  #: the key of the new one
    block: tuple[int, int] | None  #: one that both would write to, and the one that the child has in its place


class Move(NamedTuple):
    """Tokens of a sequence, of which others were left out: what was made of them goes to where they are now."""

    key: int
    blocks: Sequence[int]
    sources: Sequence[int]  #: places in the sequence as it was read, ascending
    start: int  #: the place of the first of them now; the others follow. Not after its source


class Runner(Protocol):
    """A causal language model that reads many sequences at once."""

    @property
    def vocab_size(self) -> int:
        """The length of a row of logits."""

    @property
    def context_length(self) -> int:
        """The most tokens that one sequence may have."""

    @property
    def runtime(self) -> str:
        """What runs it, for people to read."""

    @property
    def why(self) -> str:
        """Why it reads one sequence at a time; empty if it reads many."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    @property
    def blocks(self) -> int:
        """How many blocks there are; their numbers are 0 to blocks - 1."""

    @property
    def paged(self) -> bool:
        """Whether blocks hold the keys and values: then prompts may be read in parts, and blocks may be shared.

        If not, the model keeps the state of each sequence elsewhere, and its first part must be all of it.
        """

    @property
    def asynchronous(self) -> bool:
        """Whether ``forward`` returns before the logits are there, so that other work can be done meanwhile."""

    def forward(self, parts: Sequence[ModelInput]) -> Any:
        """Read the parts; float logits [L, V] of the tokens that are wanted, part by part: NumPy or torch.

        Each part is of another sequence. Reading the same positions again is allowed, and replaces what was there. If
        it raises, none of the parts counts as read, and each may be given again.
        """

    @property
    def tree_attention(self) -> bool:
        """Whether inputs may have ``parents`` and ``move`` works. A runner without the attribute counts as False."""

    def move(self, moves: Sequence[Move]) -> None:
        """Of some trees a path has been kept: have its keys and values where those of a chain would be."""

    def watch(self, layers: Sequence[int]) -> None:
        """From now on, leave in ``features`` what these layers read. () for none, as it is at first.

        A layer is meant by its number: 0 reads the embeddings, and what the last normalisation reads has the number of
        layers as its own. Raises ModelError of a model that does not let itself be watched.
        """

    @property
    def features(self) -> NDArray[np.float32]:
        """Hidden states of all tokens that the last forward read, part by part: [T, layers watched * hidden size].

        They belong to the caller. In the order in which the layers were asked for. A tensor where the logits are one.
        """

    def fork(self, forks: Sequence[Fork]) -> None:
        """Sequences go on in more ways than one: copy what is in the blocks that are named, the others are shared."""

    def forget(self, key: int) -> None:
        """A sequence has ended, or will be read from its beginning again."""

    def warm(self) -> None:
        """Compile or load now, on any thread, what forwards run through; those that can do without do not wait for it.

        Only the server asks for it: a runner of one's own need not have it.
        """


UNWATCHED = np.empty((0, 0), np.float32)


class SequentialRunner:
    """Any Model as a Runner: one sequence after the other, each with the model's own cache. Slow, and always right.

    blocks: how much is to be in memory at a time, in blocks of tokens. why: the reason for this way, for people.
    """

    paged = False
    asynchronous = False
    tree_attention = False

    def __init__(self, model: Model, blocks: int, block_size: int = BLOCK, why: str = "") -> None:
        self.model, self.blocks, self.block_size, self.why = model, blocks, block_size, why
        self.vocab_size, self.context_length, self.runtime = model.vocab_size, model.context_length, model.runtime
        self._open: dict[int, tuple[DecodingContext, int]] = {}  # and how many tokens it has read
        self.features = UNWATCHED

    def watch(self, layers: Sequence[int]) -> None:
        """See ``Runner.watch``."""
        if layers:
            raise ModelError("hidden states are to be had only of a model that reads many sequences at a time")

    def forward(self, parts: Sequence[ModelInput]) -> NDArray[np.float32]:
        """See ``Runner.forward``."""
        rows = [self._read(part) for part in parts]
        return np.concatenate([row for row in rows if len(row)] or [np.empty((0, self.vocab_size), np.float32)])

    def _read(self, part: ModelInput) -> NDArray[np.float32]:
        context, length = self._open.pop(part.key, (None, 0))  # back when it has been read
        if context is None or length != part.start:
            context, length = self.model.begin(), 0
        if length < part.start:
            context.forward(part.token_ids[: part.start])
        ids = part.token_ids[part.start : part.stop]
        if part.logits <= 1:
            logits_LV = context.forward(ids)[None][: part.logits]
        else:
            logits_LV = context.forward_all(ids)[-part.logits :]
        self._open[part.key] = context, part.stop
        return logits_LV

    def move(self, moves: Sequence[Move]) -> None:
        """There are no trees."""

    def fork(self, forks: Sequence[Fork]) -> None:
        """See ``Runner.fork``. A context that cannot be copied is not: the child is then read from its beginning."""
        weights = self.model, *getattr(self.model, "__dict__", {}).values()  # what is not copied
        shared = {id(each): each for each in weights}
        for key, child, _ in forks:
            if key in self._open:
                with suppress(Exception):  # of the model, whatever it is
                    self._open[child] = copy.deepcopy(self._open[key], shared.copy())

    def forget(self, key: int) -> None:
        """See ``Runner.forget``."""
        self._open.pop(key, None)

    def warm(self) -> None:
        """Nothing is compiled."""
