"""The public names are listed, and are cheap to import; test_site.py checks that they are documented."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nucleate as nc


def test_public_names_are_listed_and_an_unknown_one_is_an_attribute_error() -> None:
    assert set(nc.__all__) <= set(dir(nc))
    with pytest.raises(AttributeError, match="no attribute 'Sampling'"):
        nc.Sampling


def modules_after(code: str) -> set[str]:
    script = f"import sys; {code}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert not modules_after("import nucleate") & {"numpy", "torch", "transformers", "tokenizers", "jinja2", "regex"}


@pytest.mark.slow
def test_the_core_needs_only_numpy() -> None:
    loaded = modules_after("import nucleate.sampling.pipeline")
    assert "numpy" in loaded
    assert not loaded & {"torch", "transformers", "tokenizers", "jinja2", "regex", "safetensors", "numba"}


@pytest.mark.slow
def test_the_bundled_model_needs_no_torch() -> None:
    loaded = modules_after("import nucleate; nucleate.LLM().generate('Once', nucleate.SamplingParams(max_tokens=2))")
    assert not loaded & {"torch", "transformers", "huggingface_hub"}


@pytest.mark.slow
def test_generating_once_with_the_bundled_model_waits_for_no_compiler() -> None:
    code = "import nucleate as nc; [*nc.LLM().stream('A', nc.SamplingParams(max_tokens=5))]"
    assert not modules_after(code) & {"numba", "torch", "transformers"}
