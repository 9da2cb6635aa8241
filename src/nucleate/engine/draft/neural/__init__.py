"""Proposers that were trained for a model: a small Llama, and heads that read the target's hidden states.

Those for the embedded model lie in ``data`` beside this file, and are read when one is asked for. They run in NumPy, in
float32. What a model of Transformers brings with it ("mtp") is in its own folder, and is run by torch.
"""

from __future__ import annotations

from nucleate.engine.draft.draft import Proposer
from nucleate.engine.draft.neural.dflash import DFlash
from nucleate.engine.draft.neural.eagle import Eagle
from nucleate.engine.draft.neural.files import weights_for
from nucleate.engine.draft.neural.medusa import Medusa
from nucleate.engine.draft.neural.small import DraftModel
from nucleate.models.model import ModelError
from nucleate.models.transformers import TransformersModel

NAMES = ("draft", "medusa", "eagle", "dflash")
"""Those for the embedded model."""

BROUGHT = ("mtp",)
"""Those that some models bring."""


def load(name: str, model: object, branches: int = 1) -> Proposer:
    """A proposer by its name, for the model it was trained for: the embedded one, on the numpy runtime; or, for "mtp",
    one of Transformers that brings modules for multi-token prediction.

    branches: the most tokens of a draft that follow the same one, of "medusa" and "eagle"; the others make chains.
    Raises ModelError for another name or model.
    """
    match name:
        case "draft":
            return DraftModel.of(*weights_for(name, model))
        case "medusa":
            return Medusa(*weights_for(name, model), branches)
        case "eagle":
            return Eagle(*weights_for(name, model), branches)
        case "dflash":
            return DFlash(*weights_for(name, model))
        case "mtp":
            return _brought(model)
        case _:
            raise ModelError(f"there is no trained part {name!r}; there are {', '.join((*NAMES, *BROUGHT))}")


def _brought(model: object) -> Proposer:
    """Of the modules that a model brings; torch is loaded only for one that does."""
    config = model.model.config.get_text_config() if isinstance(model, TransformersModel) else None
    if not isinstance(model, TransformersModel) or not getattr(config, "num_mtp_layers", None):
        raise ModelError(
            "the model brings no modules for multi-token prediction: some models of Transformers do, run by torch, that"
            " have num_mtp_layers in their config, such as deepseek_v3, glm4_moe and mellum"
        )
    from nucleate.engine.draft.neural.mtp import Mtp
    from nucleate.models.mtp import brought

    return Mtp(brought(model))
