"""Trained draft methods: a draft model, and heads that read the target's hidden states.

Those for the embedded model lie in ``data`` beside this file, and are read when one is asked for. They run in NumPy, in
float32. What a model of Transformers brings with it ("mtp") is in its own folder, and is run by torch.
"""

from __future__ import annotations

from nucleate.models.protocol import ModelError
from nucleate.models.transformers.transformers_model import TransformersModel
from nucleate.speculative.draft import Proposer
from nucleate.speculative.proposers.neural.dflash import DFlash
from nucleate.speculative.proposers.neural.draft_model import DraftModel
from nucleate.speculative.proposers.neural.eagle import Eagle
from nucleate.speculative.proposers.neural.medusa import Medusa
from nucleate.speculative.proposers.neural.weights import weights_for

NAMES = ("draft", "medusa", "eagle", "dflash")
"""Methods with weights for the embedded model."""

BROUGHT = ("mtp",)
"""Methods whose weights come with some models."""


def load(name: str, model: object, tree_width: int = 1) -> Proposer:
    """A proposer by its name, for the model it was trained for: the embedded one, on the numpy runtime; or, for "mtp",
    one of Transformers that brings modules for multi-token prediction.

    tree_width: the most tokens of a draft that follow the same one, of "medusa" and "eagle"; the others make chains.
    Raises ModelError for another name or model.
    """
    match name:
        case "draft":
            return DraftModel.of(*weights_for(name, model))
        case "medusa":
            return Medusa(*weights_for(name, model), tree_width)
        case "eagle":
            return Eagle(*weights_for(name, model), tree_width)
        case "dflash":
            return DFlash(*weights_for(name, model))
        case "mtp":
            return _brought(model)
        case _:
            raise ModelError(f"there is no trained part {name!r}; there are {', '.join((*NAMES, *BROUGHT))}")


def _brought(model: object) -> Proposer:
    """The MTP proposer of a model; torch is loaded only if the model has MTP modules."""
    config = model.model.config.get_text_config() if isinstance(model, TransformersModel) else None
    if not isinstance(model, TransformersModel) or not getattr(config, "num_mtp_layers", None):
        raise ModelError(
            "the model brings no modules for multi-token prediction: some models of Transformers do, run by torch, that"
            " have num_mtp_layers in their config, such as deepseek_v3, glm4_moe and mellum"
        )
    from nucleate.models.transformers.mtp_module import brought
    from nucleate.speculative.proposers.neural.mtp import Mtp

    return Mtp(brought(model))
