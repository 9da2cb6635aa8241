"""Download a model from the Hugging Face hub.

Shows the progress, resumes a download that was interrupted, and checks the sums of the files. Of a repository with
several GGUF files, Q4_K_M is the default. Models go to the cache of huggingface_hub: its environment variables apply,
such as HF_HOME, HF_TOKEN and HF_ENDPOINT.
"""

from __future__ import annotations

import argparse
import sys

from nucleate.cli.argument_parser import Flag, add_flags
from nucleate.cli.list import size_text

USAGE = "[OPTIONS] OWNER/NAME[:FILE]"
REVISION = Flag("--revision REVISION", "Branch, tag or commit (default: the main branch).")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "Repository, with a GGUF file or its quantisation, as in owner/name:Q4_K_M."
    parser.add_argument("model", metavar="OWNER/NAME[:FILE]", help=text)
    add_flags(parser, [REVISION])


def run(arguments: argparse.Namespace) -> int:
    from nucleate.models.model_store import pull

    found = pull(arguments.model, arguments.revision)
    if sys.stderr.isatty():
        print("\n", file=sys.stderr)  # below the progress bars
    print(f"{found.name}: {found.kind}, {size_text(found.size)}, checksums verified")
    print(f"Chat with it: nucleate chat -m {found.name}", file=sys.stderr)
    return 0
