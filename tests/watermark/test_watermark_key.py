"""Keys: files, permissions, and that they are never shown."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stages import STAGES, Gumbel, GumbelWatermark, Kgw, SynthId
from nucleate.watermark import WatermarkKey

SECRET = b"correct horse battery staple"
KEY = WatermarkKey(SECRET)


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o600)
    return path


def test_a_key_is_read_from_a_file(key_file, caplog):
    assert WatermarkKey.read(key_file) == KEY == WatermarkKey.read(str(key_file))
    assert hash(WatermarkKey.read(key_file)) == hash(KEY)
    assert WatermarkKey(b"another key of 16 bytes") != KEY
    assert not caplog.records


def test_unsuitable_files_are_errors_that_do_not_show_the_content(tmp_path):
    path = tmp_path / "key"
    for content, message in {b"": "is empty", b" \n": "is empty", b"abcdefgh": "has 8 bytes"}.items():
        path.write_bytes(content)
        with pytest.raises(ParameterError, match=message) as error:
            WatermarkKey.read(path)
        assert "abc" not in str(error.value)
    with pytest.raises(ParameterError, match="No such file"):
        WatermarkKey.read(tmp_path / "none")
    with pytest.raises(ParameterError, match="cannot read the watermark key"):
        WatermarkKey.read(tmp_path)
    path.write_bytes(b"x" * 200_000)
    with pytest.raises(ParameterError, match="16 to 65536 bytes"):
        WatermarkKey.read(path)
    with pytest.raises(ParameterError, match="must be bytes"):
        WatermarkKey("a text of 16 characters")


def test_a_key_that_other_users_can_read_is_logged(key_file, caplog):
    key_file.chmod(0o644)
    with caplog.at_level(logging.WARNING, "nucleate"):
        WatermarkKey.read(key_file)
    assert "can be read by other users" in caplog.text
    assert "horse" not in caplog.text


def test_numbers_depend_on_the_key_the_purpose_and_the_tokens():
    found = {
        key.numbers(purpose, tokens)
        for key in (KEY, WatermarkKey(b"another key of 16 bytes"))
        for purpose in ("a", "b")
        for tokens in ((), (1,), (1, 2), (2, 1), (2**31, 0))
    }
    assert len(found) == 20
    assert all(0 <= number < 2**64 for pair in found for number in pair)
    assert KEY.numbers("kgw green", (1, 2)) == (9108069494966022849, 9648041175891523831)


def test_a_key_is_never_shown(key_file):
    shown = [repr(KEY), str(KEY), f"{KEY}"]
    logits = [[1.0, 2.0, 0.5]]
    for stage in (Kgw(key=KEY), SynthId(key=KEY), GumbelWatermark(key=KEY, seed=1)):
        pipeline = (stage,) if isinstance(stage, GumbelWatermark) else (stage, Gumbel(1))
        params = nc.SamplingParams(pipeline=pipeline)
        trace = nc.trace(logits[0], pipeline, output_ids=[0, 1, 1, 0, 2])
        shown += [repr(stage), repr(params), params.to_json(), str(nc.explain(pipeline)), str(trace), trace.to_json()]
        with pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(stage)
        assert copy.deepcopy(stage) == copy.copy(stage) == stage
        with pytest.raises(ParameterError, match="needs a watermark key"):
            nc.SamplingParams.from_json(params.to_json())
    secret = KEY._secret
    for text in shown:
        for part in (SECRET.decode(), SECRET.hex(), secret.hex(), repr(secret)[2:-1]):
            assert part not in text


@pytest.mark.parametrize("name", ["kgw", "synthid", "gumbel_watermark"])
def test_a_request_cannot_set_a_key(name):
    for given in ({}, {"key": "a secret of the client"}, {"key": None}, {"key": [1] * 16}):
        with pytest.raises(ParameterError, match="key") as error:
            nc.SamplingParams(pipeline=[{"stage": name, **given}])
        assert "secret of" not in str(error.value)
    with pytest.raises(ParameterError, match="needs a watermark key"):
        STAGES[name]()
