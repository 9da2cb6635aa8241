"""The flags for watermarks, and reading the key from its file."""

from __future__ import annotations

import argparse
import os
from typing import Any

from nucleate.parameters.parameter import ParameterError

KEY_VARIABLE = "NUCLEATE_WATERMARK_KEY_FILE"
KINDS = "Kind: kgw, gumbel or synthid, or as in 'kgw(context=2)'"


def add_watermark(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the watermark of generated text."""
    group = parser.add_argument_group("watermark")
    text = f"Watermark all outputs. {KINDS} (default: off)."
    group.add_argument("--watermark", metavar="KIND", help=text)
    add_key(group)


def add_key(group: Any) -> None:
    """Add the flag for the file with the key."""
    text = f"File with the secret key (default: ${KEY_VARIABLE})."
    group.add_argument("--watermark-key", metavar="FILE", help=text)


def read_key(arguments: argparse.Namespace) -> Any:
    """Return the key. Raises ParameterError."""
    from nucleate.sampling.watermark_key import WatermarkKey

    path = arguments.watermark_key or os.environ.get(KEY_VARIABLE)
    if not path:
        raise ParameterError("watermark_key", f"a watermark needs a key: --watermark-key FILE, or {KEY_VARIABLE}")
    return WatermarkKey.read(path)


def watermark_option(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the watermark as a keyword argument of ``LLM``; nothing without one. Raises ParameterError."""
    if arguments.watermark is None:
        if arguments.watermark_key is not None:
            raise ParameterError("watermark_key", "--watermark-key needs --watermark")
        return {}
    from nucleate.watermark import read_watermark

    return {"watermark": read_watermark(arguments.watermark, read_key(arguments))}
