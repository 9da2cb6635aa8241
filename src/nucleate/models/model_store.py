"""The models on this machine: lists those in the Hugging Face cache and in ``NUCLEATE_MODELS``, and downloads others.

Their names are those that ``LLM`` and ``--model`` take.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nucleate.models import BUNDLED_MODEL
from nucleate.models.gguf.gguf_file import first_line, hub_files, matching, model_folders, models_among, same_model
from nucleate.models.loader import EMBEDDED, OPENVINO_FILES, TOKENIZER_FILES, WEIGHTS, is_openvino
from nucleate.models.protocol import ModelError
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError

MAX_DEPTH = 3
"""Of folders below those in ``NUCLEATE_MODELS``."""
PREFERRED = "Q4_K_M"
"""The quantisation that is downloaded from a repository with several, unless a file is named."""
_HUB_NAME = re.compile(r"(?:(?:https?://)?(?:hf\.co|huggingface\.co)/)?(?P<id>[\w.-]+/[\w.-]+)(?::(?P<file>[\w./-]+))?")


@dataclass(frozen=True)
class StoredModel:
    """A model on this machine.

    name: what ``--model`` takes. kind: "embedded", "GGUF", "OpenVINO" or "folder" (of Transformers). path: its folder,
    or its file, the first one if it is split. size: of the weights, in bytes.
    """

    name: str
    kind: str
    path: Path
    size: int


def stored_models() -> list[StoredModel]:
    """The embedded model, then those in ``NUCLEATE_MODELS``, then those in the Hugging Face cache, each by name.

    Folders that cannot be read are left out.
    """
    found = [StoredModel(BUNDLED_MODEL, "embedded", EMBEDDED, weights_size(EMBEDDED))]
    known = {BUNDLED_MODEL}
    for root in model_folders():
        for one in sorted(_in_folder(root, root, MAX_DEPTH), key=lambda one: one.name):
            if one.name not in known:  # the first folder has precedence
                known.add(one.name)
                found.append(one)
    return [*found, *(one for one in _cached() if one.name not in known)]


def _in_folder(folder: Path, root: Path, depth: int) -> Iterator[StoredModel]:
    """The models in a folder of ``NUCLEATE_MODELS``, with their names relative to it."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    if folder != root and (folder / "config.json").is_file():
        yield from _of_folder(str(folder.relative_to(root)), folder)
        return
    files = [str(one.relative_to(root)) for one in entries if one.suffix == ".gguf" and one.is_file()]
    for name in models_among(files):
        yield StoredModel(name, "GGUF", root / name, _parts_size(root, name, files))
    if depth:
        for one in entries:
            if one.is_dir() and not one.name.startswith("."):
                yield from _in_folder(one, root, depth - 1)


def _cached() -> list[StoredModel]:
    """The models in the Hugging Face cache: of each repository, the newest revision."""
    import huggingface_hub

    try:
        repositories = huggingface_hub.scan_cache_dir(huggingface_hub.constants.HF_HUB_CACHE).repos
    except Exception:  # noqa: BLE001  # there is no cache, or it is damaged
        return []
    found = list[StoredModel]()
    for repository in sorted(repositories, key=lambda one: str(one.repo_id)):
        revisions = sorted(repository.revisions, key=lambda one: ("main" in one.refs, one.last_modified))
        if repository.repo_type == "model" and revisions:
            found += _of_repository(repository.repo_id, Path(revisions[-1].snapshot_path))
    return found


def _of_repository(name: str, folder: Path) -> Iterator[StoredModel]:
    yield from _of_folder(name, folder)
    files = [str(one.relative_to(folder)) for one in folder.rglob("*.gguf") if one.is_file()]
    for file in models_among(files):
        size = _parts_size(folder, file, files)
        yield StoredModel(f"{name}:{_short_name(file, files)}", "GGUF", folder / file, size)


def _of_folder(name: str, folder: Path) -> Iterator[StoredModel]:
    """The model of a folder with a config.json and weights."""
    if (folder / "config.json").is_file() and (size := weights_size(folder)):
        yield StoredModel(name, "OpenVINO" if is_openvino(folder) else "folder", folder, size)


def weights_size(folder: Path) -> int:
    """Bytes of the weights in a folder, in safetensors or for OpenVINO."""
    patterns = (WEIGHTS, *OPENVINO_FILES)
    return sum(file.stat().st_size for pattern in patterns for file in folder.glob(pattern) if file.is_file())


def _parts_size(folder: Path, first: str, files: Iterable[str]) -> int:
    """Bytes of a GGUF model, with all its parts."""
    parts = {first, *(one for one in files if same_model(one, first))}
    return sum((folder / one).stat().st_size for one in parts)


def _short_name(file: str, files: list[str]) -> str:
    """What stands for a GGUF file after the name of its repository: the quantisation if it is the only such file."""
    stem = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", file)
    short = re.split(r"[-.]", stem)[-1]
    return short if matching(files, short) == [file] else stem


def pull(model: str, revision: str | None = None, *, progress: bool = True) -> StoredModel:
    """Download a model from the Hugging Face hub, unless it is cached, and check the sums of its files.

    model: ``owner/name``, or ``owner/name:FILE`` with a GGUF file or its quantisation, such as Q4_K_M. Of a repository
    with several GGUF files, that with Q4_K_M is the default. revision: a branch, tag or commit. progress: show
    progress bars on stderr. A download that was interrupted goes on where it ended; files with a wrong sum are deleted.
    Raises ModelError, ParameterError.
    """
    name, file = read_hub_name(model)
    import huggingface_hub

    if not progress:
        huggingface_hub.utils.disable_progress_bars()
    files = _files(name, revision)
    listed = [*files]
    weights = [one for one in listed if one.endswith(".safetensors") or one in OPENVINO_FILES]
    if file is None and (not weights or "config.json" not in listed):
        file = _default_file(name, models_among(one for one in listed if one.endswith(".gguf")))
    if file is not None:
        patterns = hub_files(name, listed, file.removesuffix(".gguf"))
    else:
        kind = OPENVINO_FILES if set(weights) <= set(OPENVINO_FILES) else (WEIGHTS,)
        patterns = [*TOKENIZER_FILES, *kind]
    try:
        _fetch_large(name, revision, files, patterns)
        folder = Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:
        message = f"the download of {model} failed: {first_line(error)}; repeat the command to resume it"
        raise ModelError(message) from error
    _check_sums(name, folder)
    path = folder if file is None else folder / patterns[0]
    return next(one for one in _of_repository(name, folder) if one.path == path)


def _files(name: str, revision: str | None) -> dict[str, Any]:
    """The files of a repository, by path, as the hub describes them. Raises ModelError."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        entries = huggingface_hub.HfApi().list_repo_tree(name, recursive=True, revision=revision)
        return {one.path: one for one in entries if isinstance(one, huggingface_hub.RepoFile)}
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no repository {name}, or it is private (set HF_TOKEN)") from error
    except Exception as error:
        raise ModelError(f"cannot list the files of {name}: {first_line(error)}") from error


def _fetch_large(name: str, revision: str | None, files: dict[str, Any], patterns: list[str]) -> None:
    """Download large files to the cache, where the hub's client then finds them; what is there of a file is kept.

    The client begins a file again if the program that downloaded it has ended. ``http_get`` and the layout of the cache
    are not documented as an interface: they buy that gigabytes are resumed, with the client's progress bar and retries.
    """
    import huggingface_hub
    from huggingface_hub import constants, utils
    from huggingface_hub.file_download import http_get, repo_folder_name

    large = {path: files[path] for path in utils.filter_repo_objects(files, allow_patterns=patterns) if files[path].lfs}
    commit = huggingface_hub.HfApi().model_info(name, revision=revision).sha
    cache, folder = Path(constants.HF_HUB_CACHE), repo_folder_name(repo_id=name, repo_type="model")
    for path, entry in large.items():
        blob = cache / folder / "blobs" / entry.lfs.sha256
        lock, part = cache / ".locks" / folder / f"{blob.name}.lock", blob.with_name(f"{blob.name}.part")
        for one in (lock, blob):
            one.parent.mkdir(parents=True, exist_ok=True)
        with utils.WeakFileLock(lock):
            if blob.exists():
                continue
            with part.open("ab") as opened:
                if opened.tell() > entry.size:
                    opened.truncate(0)
                http_get(
                    huggingface_hub.hf_hub_url(name, path, revision=commit),
                    opened,
                    resume_size=opened.tell(),
                    headers=utils.build_hf_headers(),
                    expected_size=entry.size,
                    displayed_filename=Path(path).name,
                )
            part.replace(blob)


def read_hub_name(model: str) -> tuple[str, str | None]:
    """The repository and the file of ``owner/name:FILE``, also after ``hf.co/``. Raises ParameterError."""
    match = _HUB_NAME.fullmatch(model)
    if match is None:
        raise ParameterError("model", f"model must be OWNER/NAME or OWNER/NAME:FILE, got {shown(model)}")
    return match["id"], match["file"]


def _default_file(name: str, ggufs: list[str]) -> str:
    """The GGUF file of a repository that names no other. Raises ModelError."""
    if not ggufs:
        raise ModelError(f"{name} has no GGUF files, and no config.json with weights in safetensors or for OpenVINO")
    preferred = matching(ggufs, PREFERRED)
    if len(ggufs) > 1 and len(preferred) != 1:
        names = ", ".join(Path(one).name for one in ggufs[:20])
        raise ModelError(f"{name} has several GGUF models; choose one as {name}:FILE: {names}")
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", (preferred or ggufs)[0])


def _check_sums(name: str, folder: Path) -> None:
    """Compare the sums of the files in the cache with those of the hub. Raises ModelError, and deletes wrong files."""
    import huggingface_hub

    try:
        result: Any = huggingface_hub.HfApi().verify_repo_checksums(name, revision=folder.name)
    except Exception as error:
        raise ModelError(f"cannot check the files of {name}: {first_line(error)}") from error
    wrong = [str(one["path"]) for one in result.mismatches]
    for one in wrong:
        for file in ((folder / one).resolve(), folder / one):
            with suppress(OSError):
                file.unlink()
    if not wrong:
        return
    files = ", ".join(wrong)
    raise ModelError(f"the checksum of {files} is not that of the hub; deleted, so that the next download repeats it")
