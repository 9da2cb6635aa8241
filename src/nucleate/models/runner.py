"""The model runner interface: computes the tokens of many sequences in one forward pass.

The KV cache is paged: it consists of *blocks* of ``block_size`` tokens, which the engine allocates. The token at
position p of a sequence is in its block p // block_size. Sequences with a common prefix may share blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nucleate.models.protocol import Model, ModelError

BLOCK = 16
"""Default number of tokens per block."""
NO_HIDDEN_STATES = np.empty((0, 0), np.float32)


class ModelInput(NamedTuple):
    """The tokens of one sequence that a forward pass computes."""

    key: int  #: of the sequence; unique
    token_ids: Sequence[int]  #: all tokens of the sequence, prompt and output
    start: int  #: token_ids[start:stop] are computed; the tokens before are in the KV cache
    stop: int
    block_ids: Sequence[int]  #: at least ceil(stop / block_size)
    num_logits: int  #: return the logits of so many of the last tokens; 0 to stop - start
    parents: Sequence[int] | None = None
    """For tree attention: the last tokens are a tree. For each of them the index in the tree of the token it follows,
    an earlier one, or -1 for the token before the tree. A token of the tree attends to the tokens before the tree, its
    ancestors and itself; its position is that of its depth. Keys and values are stored in the order of the list.
    Tokens of the tree before ``start`` were computed before. Needs ``tree_attention``."""


class Fork(NamedTuple):
    """A new sequence that continues the KV cache of another one."""

    key: int  #: of the other one
    child: int  #: the key of the new one
    block: tuple[int, int] | None  #: a partial block to copy: its id, and the id of the child's copy


class Move(NamedTuple):
    """Move the keys and values of accepted tree tokens to their final positions."""

    key: int
    blocks: Sequence[int]
    sources: Sequence[int]  #: positions in the sequence as it was computed, ascending
    start: int  #: the new position of the first one; the others follow. Not after its source


class SavedState(NamedTuple):
    """The state of a sequence, taken out of a runner."""

    length: int  #: the tokens that are computed
    blocks: int  #: its memory, in blocks of the KV cache
    state: Any  #: the runner's own


class Runner(Protocol):
    """A causal language model that computes many sequences at once.

    Runners may derive from this class for its defaults. An optional attribute ``max_sequences`` limits how many
    sequences. An optional method ``new_sampler(backend)`` makes the sampler for its logits, which are then only indexed
    by rows, given to it, or converted with ``np.asarray``.
    """

    vocab_size: int  #: the length of a row of logits
    context_length: int  #: the maximum number of tokens of a sequence
    runtime: str  #: a readable name of the runtime and device
    unbatched_reason: str = ""  #: why sequences run one at a time; empty if they are batched
    block_size: int  #: tokens per block
    blocks: int  #: the number of blocks; their ids are 0 to blocks - 1
    paged: bool = True
    """Whether the KV cache is in blocks, so that prompts may be chunked and blocks shared.

    If not, the model keeps the state of each sequence elsewhere, and blocks only count its tokens.
    """
    unpaged_reason: str = ""  #: why it is not
    saves_states: bool = False
    """Whether ``save`` and ``restore`` work, and prompts may be chunked, although the KV cache is not paged.

    If it is neither, the first chunk must be the whole prompt. A runner without the attribute counts as False.
    """
    copies_blocks: bool = False
    """Whether ``copy_blocks`` works, so that prefixes are shared to the token. A runner without it counts as False."""
    batch_invariant: bool = False
    """Whether the logits of a token never depend on other sequences, nor on how a sequence is cut into inputs."""
    asynchronous: bool = False  #: whether ``forward`` returns before the logits are computed, to overlap other work
    tree_attention: bool = False
    """Whether inputs may have ``parents`` and ``move`` works. A runner without the attribute counts as False."""
    capture_enabled: bool = True
    """Whether forward passes capture hidden states. Set it to False while nobody reads them."""

    def forward(self, inputs: Sequence[ModelInput]) -> Any:
        """Compute inputs of different sequences. Returns the requested logits [L, V], input by input (NumPy or torch).

        They may be overwritten by the next call.
        Positions may be computed again, which replaces their keys and values. If it raises, no input counts as
        computed, and each may be retried.
        """

    def move(self, moves: Sequence[Move]) -> None:
        """Move the keys and values of accepted tree paths to where those of a chain would be."""
        return

    def capture_hidden_states(self, layers: Sequence[int]) -> None:
        """From now on, capture the inputs of these layers in ``hidden_states``; () for none, the default.

        The input of layer 0 is the embeddings; the number of layers means the input of the final norm. Raises
        ModelError for a model whose hidden states cannot be captured.
        """
        if layers:
            raise ModelError(f"hidden states cannot be captured on {self.runtime}; use another draft method")

    @property
    def hidden_states(self) -> Any:
        """Hidden states of all tokens of the last forward pass that captured them: [T, captured layers * hidden size].

        Layers are in the order given to ``capture_hidden_states``. A tensor if the logits are one.
        """
        return NO_HIDDEN_STATES

    def fork(self, forks: Sequence[Fork]) -> None:
        """Fork sequences: copy the named blocks; the others are shared."""
        if pairs := [fork.block for fork in forks if fork.block is not None]:
            self.copy_blocks(pairs)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of the KV cache.

        pairs: source and target. No target is the source of a later pair.
        """
        return

    def save(self, key: int) -> SavedState | None:
        """Take the state of a sequence out of the runner; None if it has none.

        key: of the sequence, which may still continue after ``restore``.
        """
        return None

    def restore(self, key: int, saved: SavedState) -> None:
        """Continue a sequence from a copy of a state.

        key: of a new sequence, or of one whose state was taken. saved: the state, as ``save`` returned it.
        """
        return

    def forget(self, key: int) -> None:
        """A sequence has finished."""
        return

    def warm(self) -> None:
        """Compile or load kernels now, on any thread. Optional: forward passes do not need it to have been called."""
        return


CONTEXT_TOKENS = 1 << 13
"""The maximum length of a ``RunnerContext``; the engine has no such limit."""


class RunnerContext:
    """One sequence in the KV cache of a runner of its own; see ``DecodingContext``."""

    def __init__(self, runner: Runner) -> None:
        self._tokens: list[int] = []
        self._runner = runner

    def forward(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """See ``DecodingContext.forward``."""
        last_V: NDArray[np.float32] = self._forward(token_ids, 1)[-1]
        return last_V

    def forward_all(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """See ``DecodingContext.forward_all``."""
        return self._forward(token_ids, len(token_ids))

    def _forward(self, token_ids: Sequence[int], num_logits: int) -> NDArray[np.float32]:
        tokens, runner = [*self._tokens, *token_ids], self._runner
        if len(tokens) > runner.blocks * runner.block_size:
            raise ModelError(f"a single sequence has at most {runner.blocks * runner.block_size} tokens here")
        blocks = range(-(-len(tokens) // runner.block_size))
        given = ModelInput(0, tokens, len(self._tokens), len(tokens), blocks, num_logits)
        logits_LV: NDArray[np.float32] = runner.forward([given]).copy()
        self._tokens = tokens
        return logits_LV


def blocks_in(memory: int, block_bytes: int) -> int:
    """The number of blocks of a KV cache. memory: bytes. Raises ModelError if they are less than a block."""
    if memory < block_bytes:
        raise ModelError(f"the KV cache needs at least {block_bytes} bytes (one block), got {memory}")
    return memory // block_bytes


class SequentialRunner(Runner):
    """Runs any Model one sequence at a time, each with the model's own cache: slow, but it always works.

    blocks: capacity for all sequences, in blocks of tokens. unbatched_reason: why sequences are not batched.
    """

    paged = False

    def __init__(self, model: Model, blocks: int, block_size: int = BLOCK, unbatched_reason: str = "") -> None:
        self.model, self.blocks, self.block_size = model, blocks, block_size
        self.unbatched_reason = self.unpaged_reason = unbatched_reason
        self.vocab_size, self.context_length, self.runtime = model.vocab_size, model.context_length, model.runtime
        self._open: dict[int, tuple[Any, int]] = {}  # contexts, with the number of computed tokens
        self._prompts: dict[int, int] = {}  # the length of the prompt by key: that of its first input
        self._splits_prompt = bool(getattr(model, "bidirectional_prompt", False))

    def forward(self, inputs: Sequence[ModelInput]) -> NDArray[np.float32]:
        """See ``Runner.forward``."""
        rows = [self._forward(each) for each in inputs]
        return np.concatenate([row for row in rows if len(row)] or [np.empty((0, self.vocab_size), np.float32)])

    def _forward(self, each: ModelInput) -> NDArray[np.float32]:
        context, length = self._open.pop(each.key, (None, 0))  # removed, in case the forward pass raises
        if context is None or length != each.start:
            context, length = self.model.begin(), 0
        prompt, first = self._prompts.setdefault(each.key, each.stop), each.start
        if self._splits_prompt and length < prompt <= each.stop - max(each.num_logits, 1):  # recomputed with its output
            context.forward(each.token_ids[:prompt])
            length, first = prompt, max(first, prompt)
        if length < first:
            context.forward(each.token_ids[length:first])
        ids = each.token_ids[first : each.stop]
        logits_LV: NDArray[np.float32]
        if each.num_logits <= 1:
            logits_LV = context.forward(ids)[None][: each.num_logits]
        else:
            logits_LV = context.forward_all(ids)[-each.num_logits :]
        self._open[each.key] = context, each.stop
        return logits_LV

    def fork(self, forks: Sequence[Fork]) -> None:
        """See ``Runner.fork``. If a context cannot be copied, the child is computed from its start."""
        weights = self.model, *getattr(self.model, "__dict__", {}).values()
        shared = {id(each): each for each in weights}  # not copied
        for key, child, _ in forks:
            self._prompts[child] = self._prompts.get(key, 0)
            if key in self._open:
                with suppress(Exception):  # the model's code may raise anything
                    self._open[child] = copy.deepcopy(self._open[key], shared.copy())

    def forget(self, key: int) -> None:
        """See ``Runner.forget``."""
        self._open.pop(key, None)
        self._prompts.pop(key, None)
