"""The ``system_fingerprint`` of responses."""

from __future__ import annotations

import json
from hashlib import sha256

from nucleate import __version__
from nucleate.llm import LLM
from nucleate.sampling_params import SamplingParams


def system_fingerprint(llm: LLM, defaults: SamplingParams) -> str:
    """Identify what the output of a request depends on besides its fields: with the same seed, it is the same.

    Covers the version, the files of the model by name and size, how it runs, and the default parameters. defaults: the
    parameters that a request does not set.
    """
    model, folder, speculation = llm.model, llm.folder, llm.speculative_config
    files = [] if folder is None or not folder.is_dir() else sorted(folder.iterdir())
    parts = [
        *(type(model).__name__, model.runtime, model.vocab_size, model.context_length),
        [(file.name, file.stat().st_size) for file in files if file.is_file()],
        *(str(getattr(model, name, None)) for name in ("dtype", "device")),
        None if speculation is None or speculation.acceptance_rule == "coupled" else repr(speculation),
        repr(llm.watermark),
        defaults.to_json(),
    ]
    digest = sha256(json.dumps(parts, default=str).encode(errors="replace")).hexdigest()
    return f"nucleate-{__version__}-{digest[:8]}"
