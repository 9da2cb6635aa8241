"""A server with a watermark: all requests carry it, and no response, log line or metric shows the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_process import Server

from nucleate.watermark import WatermarkKey, detect

SECRET = b"correct horse battery staple"
STORY = {"prompt": "Once upon a time", "max_tokens": 150, "ignore_eos": True, "seed": 4}


@pytest.mark.slow
def test_every_request_is_marked_and_the_key_stays_on_the_server(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    key, shown = WatermarkKey(SECRET), []
    with Server("--watermark", "kgw(delta=4)", "--watermark-key", str(path)) as server:
        for more in ({}, {"temperature": 0}, {"pipeline": [{"stage": "temperature", "t": 0.9}]}, {"top_p": 0.9}):
            answer = server.request("POST", "/v1/completions", {**STORY, **more})
            assert answer.status == 200, answer.data.decode()
            shown.append(answer.data.decode())
            text = answer.json["choices"][0]["text"]
            ids = server.request("POST", "/tokenize", {"prompt": text, "add_special_tokens": False}).json["tokens"]
            assert detect(ids, key).p_value < 1e-3
        for stage in ({"stage": "kgw"}, {"stage": "kgw", "key": "correct horse"}, {"stage": "gumbel_watermark"}):
            answer = server.request("POST", "/v1/completions", {**STORY, "pipeline": [stage]})
            assert answer.status == 400
            shown.append(answer.data.decode())
        shown += [
            server.request("GET", route).data.decode()
            for route in ("/metrics", "/v1/models", "/openapi.json", "/health")
        ]
        shown.append(server.log)
    for text in shown:
        assert "horse" not in text
        assert SECRET.hex() not in text
