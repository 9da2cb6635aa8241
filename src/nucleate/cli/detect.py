"""Look for a watermark in a text, and print its p-value.

The p-value is the probability of such a text without the watermark. Exit status: 0 if it is at most --threshold, 3 if
it is higher, 1 or 2 for errors.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from nucleate.cli import flags
from nucleate.cli.argument_parser import Flag, UsageError, add_flags

USAGE = "[OPTIONS] [FILE]"
NOT_DETECTED = 3
FLAGS = (
    Flag("--watermark KIND", flags.WATERMARK_KINDS, "kgw"),
    flags.WATERMARK_KEY,
    Flag("-m, --model MODEL", "Model of the tokenizer (default: bundled)."),
    Flag("--threshold P", "Highest p-value of a detection", 0.001),
    Flag("--json", "Print one JSON object instead of text."),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", default="-", metavar="FILE", help="File with the text; - reads stdin.")
    add_flags(parser, FLAGS)


def run(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.threshold < 1:
        raise UsageError(f"--threshold must be a number > 0 and < 1, got {arguments.threshold:g}")
    key = flags.read_key(arguments)
    from nucleate.llm.model_loading import given_tokenizer
    from nucleate.models.loader import EMBEDDED
    from nucleate.watermark import detect, read_watermark

    watermark = read_watermark(arguments.watermark, key)
    file = arguments.file
    text = flags.read_stdin() if file == "-" else flags.decode(Path(file).read_bytes(), file)
    ids = given_tokenizer(arguments.model or EMBEDDED).encode(text, add_special_tokens=False)
    found = detect(ids, key, watermark)
    detected = found.p_value <= arguments.threshold
    if arguments.json:
        print(json.dumps({"detected": detected, **found._asdict(), "num_tokens": len(ids)}))
    else:
        print(f"{'detected' if detected else 'not detected'}: p-value {found.p_value:.3g}")
        print(f"statistic {found.statistic:.4f}, {found.expected:.4f} expected without the watermark")
        print(f"{found.num_scored} of {len(ids)} tokens scored")
    return 0 if detected else NOT_DETECTED
