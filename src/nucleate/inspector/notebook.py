"""``nc.inspect``: the inspector in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nucleate.inspector.session import InspectorSession
from nucleate.llm import LLM
from nucleate.parameters.converters import install_extra
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nucleate.inspector.widget import InspectorWidget


@with_suggestions
def inspect(
    llm: LLM,
    prompt: str | Sequence[Mapping[str, Any]],
    params: SamplingParams | None = None,
    **values: Any,
) -> InspectorWidget:
    """Generate an answer, and show every sampling stage of each of its tokens in a notebook.

    llm: the model. prompt: a text, or a conversation ``[{"role": ..., "content": ...}, ...]``. params: the sampling
    parameters; or pass fields of SamplingParams as keywords (``temperature=0.7``). The widget is shown when a cell ends
    with it, in Jupyter, VS Code and marimo. Needs the extra ``notebook``. Raises ParameterError.
    """
    try:
        from nucleate.inspector.widget import InspectorWidget
    except ModuleNotFoundError as error:
        needed = f"the inspector in a notebook needs anywidget: {install_extra('notebook')}"
        raise ModuleNotFoundError(needed, name=error.name) from None
    if not isinstance(llm, LLM):
        raise ParameterError("llm", f"llm must be an LLM, got {type(llm).__name__}")
    if params is not None and values:
        raise ParameterError("params", f"give either params or {', '.join(values)}, not both")
    if params is not None and not isinstance(params, SamplingParams):
        raise ParameterError("params", f"params must be a SamplingParams, got {type(params).__name__}")
    given = (SamplingParams(**values) if params is None else params).to_dict()
    source = {"prompt": prompt} if isinstance(prompt, str) else {"messages": [dict(each) for each in prompt]}
    return InspectorWidget(InspectorSession(llm), {**source, "params": given})
