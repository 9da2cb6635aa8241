"""Proposers that were trained for the embedded model: a small Llama, and heads that read the target's hidden states.

Their weights lie in ``data`` beside this file, and are read when one is asked for. They run in NumPy, in float32.
"""

from __future__ import annotations

from nucleate.engine.draft.draft import Proposer
from nucleate.engine.draft.neural.dflash import DFlash
from nucleate.engine.draft.neural.eagle import Eagle
from nucleate.engine.draft.neural.medusa import Medusa
from nucleate.engine.draft.neural.small import DraftModel
from nucleate.models.model import ModelError

NAMES = ("draft", "medusa", "eagle", "dflash")


def load(name: str, model: object) -> Proposer:
    """A proposer by its name, for the model it was trained for: the embedded one, on the numpy runtime.

    Raises ModelError for another name or model.
    """
    match name:
        case "draft":
            return DraftModel.load(model)
        case "medusa":
            return Medusa.load(model)
        case "eagle":
            return Eagle.load(model)
        case "dflash":
            return DFlash.load(model)
        case _:
            raise ModelError(f"there is no trained part {name!r}; there are {', '.join(NAMES)}")
