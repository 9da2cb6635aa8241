"""How much memory keys and values take without being told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import nucleate as nc
from nucleate.models import free_memory, loader


def test_what_is_free_is_between_nothing_and_all() -> None:
    assert 1 << 20 < free_memory.free() < 1 << 50


def test_where_linux_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 10}.__getitem__)
    assert free_memory.free() == 40960
    monkeypatch.delattr(os, "sysconf")
    assert free_memory.free() == free_memory.DEFAULT


def test_a_quarter_is_the_most(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "free", lambda: 1 << 20)
    block = 16 * llm.model.token_bytes
    assert loader.runner_of(llm.model, tokens=32).blocks == 2
    assert loader.runner_of(llm.model).blocks == (1 << 18) // block


def test_an_engine_takes_what_its_sequences_can_fill(llm: nc.LLM) -> None:
    assert llm.new_engine(max_num_seqs=2).stats.num_kv_blocks == 2 * 1024 // 16
    assert llm.new_engine(kv_cache_memory=1 << 20).stats.num_kv_blocks < 100
    with pytest.raises(nc.ModelError, match="needs at least"):
        llm.new_engine(kv_cache_memory=1000)
    with pytest.raises(nc.ParameterError, match="kv_cache_memory must be an integer >= 1"):
        llm.new_engine(kv_cache_memory=0)
