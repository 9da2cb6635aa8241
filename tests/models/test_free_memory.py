"""The default size of the KV cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import nucleate as nc
from nucleate.models import loader, paged_cache


def test_free_memory_is_between_zero_and_the_total() -> None:
    assert 1 << 20 < paged_cache.free_memory() < 1 << 50


def test_free_memory_without_proc_meminfo(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 10}.__getitem__)
    assert paged_cache.free_memory() == 40960
    monkeypatch.delattr(os, "sysconf")
    assert paged_cache.free_memory() == paged_cache.DEFAULT_FREE_MEMORY


def test_the_kv_cache_takes_at_most_a_quarter(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "free_memory", lambda: 1 << 20)
    block = 16 * llm.model.token_bytes
    assert loader.runner_of(llm.model, tokens=32).blocks == 2
    assert loader.runner_of(llm.model).blocks == (1 << 18) // block


def test_the_kv_cache_is_not_larger_than_its_sequences(llm: nc.LLM) -> None:
    assert llm.new_engine(max_num_seqs=2).stats.num_kv_blocks == 2 * 1024 // 16
    assert llm.new_engine(kv_cache_memory=1 << 20).stats.num_kv_blocks < 100
    with pytest.raises(nc.ModelError, match="needs at least"):
        llm.new_engine(kv_cache_memory=1000)
    with pytest.raises(nc.ParameterError, match="kv_cache_memory must be an integer >= 1"):
        llm.new_engine(kv_cache_memory=0)
