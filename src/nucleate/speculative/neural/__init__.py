"""Trained draft methods: a draft model, and heads that read the target's hidden states.

Weights for the embedded model are in ``data`` next to this file, and run in NumPy, in float32. "mtp" uses the MTP
modules of a Transformers model, and runs on torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nucleate.models.loader import ModelSource, check_vocabulary, runner_of
from nucleate.models.protocol import Model, ModelError
from nucleate.models.runner import BLOCK
from nucleate.models.transformers.transformers_model import TransformersModel
from nucleate.speculative.draft import Proposer
from nucleate.speculative.neural.dflash import DFlash
from nucleate.speculative.neural.draft_head import weights_for
from nucleate.speculative.neural.draft_model import KV_CACHE_BYTES, DraftModel
from nucleate.speculative.neural.eagle import Eagle
from nucleate.speculative.neural.eagle_checkpoint import load_eagle
from nucleate.speculative.neural.medusa import Medusa
from nucleate.speculative.neural.medusa_checkpoint import load_medusa

EMBEDDED_METHODS: dict[str, Any] = {"draft": DraftModel.of, "medusa": Medusa, "eagle": Eagle, "dflash": DFlash}
"""Methods with weights for the embedded model. Those of "mtp" are part of some models."""


def load(name: str, model: object, tree_width: int = 1) -> Proposer:
    """Load a trained proposer for the embedded model on the numpy runtime or, for "mtp", for a Transformers model.

    tree_width: maximum number of children of a node, for "medusa" and "eagle"; the other methods draft chains.
    Raises ModelError for an unknown name, or a model without draft weights.
    """
    if name == "mtp":
        return _load_mtp(model)
    if name not in EMBEDDED_METHODS:
        raise ModelError(f"unknown trained method {name!r}; available: {', '.join(EMBEDDED_METHODS)}, mtp")
    width = (tree_width,) if name in ("medusa", "eagle") else ()
    made: Proposer = EMBEDDED_METHODS[name](*weights_for(name, model), *width)
    return made


def load_given(name: str, given: Any, target: Model, tree_width: int = 1) -> Callable[[], Proposer]:
    """A draft model or draft head that the caller gives: a folder or a Hugging Face id.

    A draft model can also be a GGUF model, or a model in memory. Returns a function that makes a proposer for an
    engine. Raises ModelError for a model with another vocabulary, one that cannot run batched, or a head that is not in
    a public layout or not for a target of this size; ParameterError.
    """
    if name == "draft":
        return _load_draft_model(given, target)
    return {"eagle": load_eagle, "medusa": load_medusa}[name](given, target, tree_width)


def _load_draft_model(given: Any, target: Model) -> Callable[[], Proposer]:
    model = ModelSource.find(given, device="auto", dtype="auto", runtime="auto", revision=None).load()
    check_vocabulary("draft model", model, target)
    memory = max(KV_CACHE_BYTES, 64 * BLOCK * getattr(model, "token_bytes", 0))

    def new_proposer() -> Proposer:
        runner = runner_of(model, memory)
        if not runner.paged:
            raise ModelError(f"the draft model must have a paged KV cache: {runner.unpaged_reason}")
        return DraftModel(runner)

    new_proposer()  # fail here rather than in the first request
    return new_proposer


def _load_mtp(model: object) -> Proposer:
    """The MTP proposer of a model."""
    if isinstance(model, TransformersModel):
        from nucleate.models.transformers.mtp_module import brought, has_modules
        from nucleate.speculative.neural.mtp import Mtp

        if has_modules(model.model):
            return Mtp(brought(model))
    raise ModelError(
        "the model has no multi-token prediction (MTP) modules; the method needs a Transformers model on torch with"
        " modules in its folder, such as deepseek_v3, glm4_moe or mellum"
    )
