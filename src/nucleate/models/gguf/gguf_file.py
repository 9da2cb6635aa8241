"""Finds the file of a GGUF model: a path, a folder, or a quantisation in a repository of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from nucleate.models.protocol import ModelError
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError

MAGIC = b"GGUF"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
"""Files beside a model that may have its chat template."""
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_HUB_FILE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+):(?P<file>[\w.-]+(/[\w.-]+)*)")
MODELS_VARIABLE = "NUCLEATE_MODELS"
"""The environment variable with folders of models, separated as in PATH."""


def model_folders() -> list[Path]:
    """The folders in ``NUCLEATE_MODELS``."""
    return [Path(one).expanduser() for one in os.environ.get(MODELS_VARIABLE, "").split(os.pathsep) if one]


def local_path(model: str) -> Path:
    """The path of a model by its name: a file or a folder that exists, if necessary in ``NUCLEATE_MODELS``.

    There, a GGUF file is also found without its suffix. Without such a file or folder, the path is the name itself.
    """
    path = Path(model).expanduser()
    if not path.is_absolute() and not path.exists():
        for folder in model_folders():
            for found in (folder / model, folder / f"{model}.gguf"):
                if found.exists():
                    return found
    return path


def find_gguf(model: str | os.PathLike[str], revision: str | None = None) -> Path | None:
    """The file of a model, the first one if it is split; None if the model is not a GGUF model.

    model: a file, a folder with one GGUF model and no config.json (by its path, or by its name in ``NUCLEATE_MODELS``),
    or ``owner/name:Q4_K_M`` on the Hugging Face hub. revision: of a hub repository. Raises ModelError, ParameterError.
    """
    name = os.fspath(model)
    path = local_path(name)
    if (match := _HUB_FILE.fullmatch(name)) and not path.exists():
        return _downloaded(match["repository"], match["file"].removesuffix(".gguf"), revision)
    if path.suffix == ".gguf" and not path.is_dir():
        found: Path | None = _checked(path)
    else:
        found = None if (path / "config.json").is_file() else _in_folder(path)
    if found is not None and revision is not None:
        raise ParameterError(
            "revision", f"revision needs a Hugging Face id, but model is a file; got {shown(revision)}"
        )
    return found


def _in_folder(folder: Path) -> Path | None:
    """The only GGUF model of a folder; None if there is none."""
    found = models_among(str(one) for one in folder.glob("*.gguf")) if folder.is_dir() else []
    if len(found) > 1:
        names = ", ".join(Path(one).name for one in found[:8])
        raise ModelError(f"{folder} has several GGUF models; choose a file: {names}")
    return _checked(Path(found[0])) if found else None


def models_among(names: Iterable[str]) -> list[str]:
    """Files of models, the first one of each split model, without the vision parts that llama.cpp calls mmproj."""
    found = []
    for name in sorted(names):
        match = _SPLIT.search(name)
        if (match is None or int(match[1]) == 1) and not Path(name).name.startswith("mmproj"):
            found.append(name)
    return found


def _checked(path: Path) -> Path:
    """The first file of a model. Raises ModelError if a file is missing, or is not a GGUF file."""
    match = _SPLIT.search(path.name)
    files = [path]
    if match is not None:
        stem, count = path.name[: match.start()], int(match[2])
        files = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise ModelError(f"there is no file {file}")
        try:
            with file.open("rb") as opened:
                start = opened.read(len(MAGIC))
        except OSError as error:
            raise ModelError(f"cannot read {file}: {error.strerror}") from error
        if start != MAGIC:
            raise ModelError(f"{file} is not a GGUF file")
    return files[0]


def _downloaded(repository: str, quantisation: str, revision: str | None) -> Path:
    """The file of a quantisation in a hub repository, downloaded unless it is cached."""
    import huggingface_hub

    try:
        listed = huggingface_hub.HfApi().list_repo_files(repository, revision=revision)
    except Exception as error:  # noqa: BLE001  # the hub's client raises errors of many libraries
        return _cached(repository, quantisation, revision, error)
    files = hub_files(repository, listed, quantisation)
    try:
        folder = huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=files)
    except Exception as error:
        raise ModelError(f"the download of {repository}:{quantisation} failed: {first_line(error)}") from error
    return _checked(Path(folder) / files[0])


def hub_files(repository: str, listed: list[str], quantisation: str) -> list[str]:
    """The files of a quantisation among those in a repository: those of the model first, then chat templates.

    Raises ModelError if there are none.
    """
    files = matching(listed, quantisation)
    if not files:
        available = [Path(one).name for one in models_among(one for one in listed if one.endswith(".gguf"))]
        has = f"it has {', '.join(available[:20])}" if available else "it has no GGUF files"
        raise ModelError(f"{repository} has no GGUF model {quantisation!r}; {has}")
    others = [one for one in listed if one != files[0] and same_model(one, files[0])]
    return [files[0], *others, *(one for one in listed if one in TEMPLATE_FILES)]


def _cached(repository: str, quantisation: str, revision: str | None, cause: Exception) -> Path:
    """The file in the local cache, if the hub cannot be reached.

    ``snapshot_download`` without the hub rejects a repository of which only some files were downloaded.
    """
    import huggingface_hub

    try:
        cached = huggingface_hub.scan_cache_dir(huggingface_hub.constants.HF_HUB_CACHE).repos
    except Exception:  # noqa: BLE001  # as above
        cached = frozenset()
    folder, files = Path(), list[str]()
    for one in (one for found in cached if found.repo_id == repository for one in found.revisions):
        if (revision or "main") in (*one.refs, one.commit_hash):
            folder = Path(one.snapshot_path)
            files = matching([str(file.relative_to(folder)) for file in folder.rglob("*.gguf")], quantisation)
    if not files:
        at = "" if revision is None else f" at revision {revision!r:.80}"
        raise ModelError(
            f"{repository}:{quantisation} is not cached, and the hub{at} failed: {first_line(cause)}"
        ) from cause
    return _checked(folder / files[0])


def matching(names: list[str], quantisation: str) -> list[str]:
    """The models among files whose name ends with a quantisation, such as ``Qwen3-0.6B-Q4_K_M.gguf``."""
    end = re.compile(rf"(^|[-._/]){re.escape(quantisation)}(-\d{{5}}-of-\d{{5}})?\.gguf$", re.IGNORECASE)
    return models_among(name for name in names if end.search(name))


def same_model(name: str, first: str) -> bool:
    """Whether a file is a part of the split model that starts with another one."""
    one, other = _SPLIT.search(name), _SPLIT.search(first)
    return one is not None and other is not None and name[: one.start()] == first[: other.start()]


def first_line(error: Exception) -> str:
    """The first line of an error of the hub's client, which may have many."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
