"""What an inspected request costs the others: their tokens per second beside no further request, one with logprobs, and
an inspected one.

A server streams to a constant number of clients; one more client sends requests of each kind in turn, for some seconds
each. Measured for the embedded model, and for a random Llama with 128,256 tokens (its forward pass is small, so that
the work per token weighs most).

    python benchmarks/inspector_cost.py [--clients 4] [--seconds 4] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from server_process import Server

import nucleate.models.embedded

LARGE = 128_256
FIELDS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "max_tokens": 200, "ignore_eos": True}
PROMPT = "Once upon a time"
KINDS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "none": None,
    "plain": ("/v1/completions", {"prompt": PROMPT, "stream": True, **FIELDS}),
    "logprobs 20": ("/v1/completions", {"prompt": PROMPT, "stream": True, "logprobs": 20, **FIELDS}),
    "inspected": ("/inspector/api/generate", {"prompt": PROMPT, "params": FIELDS}),
}


class Client:
    """Streams one request after the other, and counts the events. Runs on a thread until it is stopped."""

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        self._host, self._path, self._body = urlsplit(url).netloc, path, json.dumps(body).encode()
        self.bytes = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            connection = http.client.HTTPConnection(self._host)
            connection.request("POST", self._path, self._body, {"content-type": "application/json"})
            response = connection.getresponse()
            while not self._stopped and (data := response.read1(65536)):
                self.bytes += len(data)
            connection.close()


def rate(server: Server, neighbours: Sequence[Client], kind: str, seconds: float) -> float:
    """The tokens per second of the server without those of the further request, from its metrics."""
    job = KINDS[kind]
    client = None if job is None else Client(server.url, *job)
    time.sleep(0.5)
    before, begin = sum(each.bytes for each in neighbours), time.perf_counter()
    time.sleep(seconds)
    found = (sum(each.bytes for each in neighbours) - before) / (time.perf_counter() - begin)
    if client is not None:
        client.stop()
    return found


def large_model(folder: Path) -> Path:
    """A folder with a random Llama of one layer, and the tokenizer of the embedded model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=LARGE, max_position_embeddings=1024, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(nucleate.models.embedded.__path__[0]) / name, folder)
    return folder


def measure(flags: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    with Server(*flags) as server:
        server.warmed()
        body = {"prompt": PROMPT, "stream": True, **FIELDS}
        neighbours = [Client(server.url, "/v1/completions", {**body, "seed": i}) for i in range(options.clients)]
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(options.rounds):
            for kind in KINDS:
                rates[kind].append(rate(server, neighbours, kind, options.seconds))
        for each in neighbours:
            each.stop()
    none = rates["none"]
    return {
        kind: round(statistics.median(own / alone for own, alone in zip(found, none, strict=True)), 3)
        for kind, found in rates.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = {"what": f"tokens per second of {options.clients} streams, relative to those without a further request"}
    with tempfile.TemporaryDirectory() as folder:
        models = {"embedded model, V = 4,096": [], "random Llama, V = 128,256": ["-m", str(large_model(Path(folder)))]}
        for name, flags in models.items():
            result[name] = measure(flags, options)  # type: ignore[assignment]
            print(name, json.dumps(result[name]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
