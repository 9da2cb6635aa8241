"""Compares the engine on a GGUF model with llama-cpp-python and its server: tokens per second at 1, 8 and 32 sequences.

Run: python benchmarks/gguf_models.py [--model FILE] [--json FILE]; --start measures the start of the servers only: the
seconds until they are ready and until the first token, and their largest memory.

Without --model, a random Llama of 60 million parameters is written as Q8_0: large enough that the forward pass counts
as in larger models. All contenders run in turn in one process, --rounds times, on the same number of threads, with
outputs of the same length; the table has medians. The batch-invariant contender switches llama.cpp's tiled products off
for the whole process, so for the others, too. Needs ``make setup-gguf``.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nucleate as nc
from nucleate.engine.request import Request

PROMPT = "Once upon a time there was a little girl who lived in a small house near the forest with her dog."
TOKENS = 96
VOCABULARY = 4096


def write_model(folder: Path) -> Path:
    """Write a random Llama with the tokenizer of the embedded model."""
    import shutil

    import torch
    import transformers

    from nucleate.models.loader import EMBEDDED

    spec = importlib.util.spec_from_file_location(
        "write_gguf", Path(__file__).parents[1] / "training" / "write_gguf.py"
    )
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=2048, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder / name)
    module.write(folder, folder / "model.gguf", "q8_0")
    return folder / "model.gguf"


def check(condition: bool) -> None:
    """Raise RuntimeError if a contender did not do its work."""
    if not condition:
        raise RuntimeError("a contender failed")


class Engine:
    """Our engine. fraction: of the time outside llama_decode, in the last run."""

    def __init__(self, model: Path, threads: int, *, batch_invariant: bool = False) -> None:
        self.llm = nc.LLM(
            model, generation_config="none", gguf_options={"n_threads": threads}, batch_invariant=batch_invariant
        )
        self.ids, self.fraction = self.llm.encode(PROMPT), 0.0

    def run(self, count: int, temperature: float = 0.0) -> float:
        """Answer the prompt so many times at once; returns the seconds, as all contenders do.

        No prefix is shared, as with the other contenders. The KV cache is allocated before.
        """
        engine = self.llm.new_engine(max_num_seqs=count, enable_prefix_caching=False, max_num_batched_tokens=512)
        for seed in range(count):
            params = nc.SamplingParams(
                temperature=temperature, top_p=0.95, seed=seed, max_tokens=TOKENS, ignore_eos=True
            )
            engine.add(Request(self.ids, params))
        begin = time.perf_counter()
        while len(engine):
            engine.step()
        elapsed = time.perf_counter() - begin
        self.fraction = 1 - engine.stats.forward_seconds / elapsed
        return elapsed


def completion(model: Path, threads: int) -> Callable[[float], float]:
    """``create_completion`` of llama-cpp-python."""
    import llama_cpp

    llama = llama_cpp.Llama(str(model), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(temperature: float) -> float:
        llama.reset()
        begin = time.perf_counter()
        bias = dict.fromkeys((0,), -100.0)
        made = llama.create_completion(PROMPT, max_tokens=TOKENS, temperature=temperature, top_p=0.95, logit_bias=bias)
        elapsed = time.perf_counter() - begin
        check(made["usage"]["completion_tokens"] == TOKENS)  # type: ignore[index]
        return elapsed

    return run


def batched(model: Path, threads: int) -> Callable[[int], float]:
    """The pattern of llama.cpp's example ``batched``: one llama_decode for all sequences, a greedy sampler for each."""
    from llama_cpp import llama_cpp as lib

    params = lib.llama_model_default_params()
    loaded = lib.llama_model_load_from_file(str(model).encode(), params)
    vocab = lib.llama_model_get_vocab(loaded)
    text = PROMPT.encode()
    room = (lib.llama_token * 256)()
    ids = room[: lib.llama_tokenize(vocab, text, len(text), room, 256, True, True)]

    def run(count: int) -> float:
        settings = lib.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_seq_max = count * (len(ids) + TOKENS + 32), 2048, count
        settings.n_threads = settings.n_threads_batch = threads
        settings.kv_unified = True
        context = lib.llama_init_from_model(loaded, settings)
        samplers = [lib.llama_sampler_init_greedy() for _ in range(count)]
        batch = lib.llama_batch_init(2048, 0, 1)

        def add(token: int, position: int, sequence: int, *, logits: bool) -> None:
            i = batch.n_tokens
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, logits
            batch.seq_id[i][0] = sequence
            batch.n_tokens = i + 1

        begin = time.perf_counter()
        batch.n_tokens = 0
        for sequence in range(count):
            for position, token in enumerate(ids):
                add(token, position, sequence, logits=position == len(ids) - 1)
        check(not lib.llama_decode(context, batch))
        rows = [(sequence + 1) * len(ids) - 1 for sequence in range(count)]
        for step in range(TOKENS):
            tokens = [lib.llama_sampler_sample(one, context, row) for one, row in zip(samplers, rows, strict=True)]
            for token in tokens:
                piece = ctypes.create_string_buffer(32)
                lib.llama_token_to_piece(vocab, token, piece, 32, 0, True)
            if step == TOKENS - 1:
                break
            batch.n_tokens, rows = 0, list(range(count))
            for sequence, token in enumerate(tokens):
                add(token, len(ids) + step, sequence, logits=True)
            check(not lib.llama_decode(context, batch))
        elapsed = time.perf_counter() - begin
        lib.llama_batch_free(batch)
        for one in samplers:
            lib.llama_sampler_free(one)
        lib.llama_free(context)
        return elapsed

    return run


SERVERS: dict[str, Callable[[Path, int, int], list[str]]] = {
    "nucleate serve": lambda model, threads, port: [
        *("nucleate", "serve", "-m", str(model), "--n-threads", str(threads), "--port", str(port)),
        *("--generation-config", "none"),
    ],
    "llama_cpp.server": lambda model, threads, port: [
        *("llama_cpp.server", "--model", str(model), "--n_threads", str(threads), "--n_ctx", "2048"),
        *("--port", str(port), "--verbose", "false"),
    ],
}


def measure_servers(model: Path, threads: int, rounds: int, counts: list[int]) -> dict[str, Any]:
    """Tokens per second of the servers, with so many clients at once. Needs the extra server of llama-cpp-python."""
    result: dict[str, Any] = {}
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "logit_bias": {"0": -100}}
    for port, (name, command) in enumerate(SERVERS.items(), 8471):
        process = start([*command(model, threads, port)])
        try:
            url = f"http://127.0.0.1:{port}/v1"
            wait_until_ready(f"{url}/models", process)

            def ask(_: int, url: str = url) -> None:
                request = urllib.request.Request(  # noqa: S310
                    f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=600) as response:  # noqa: S310
                    check(json.load(response)["usage"]["completion_tokens"] == TOKENS)

            ask(0)
            for count in counts:
                times = []
                for _ in range(rounds):
                    with ThreadPoolExecutor(count) as pool:
                        begin = time.perf_counter()
                        list(pool.map(ask, range(count)))
                        times.append(time.perf_counter() - begin)
                speed = round(count * TOKENS / statistics.median(times), 1)
                result.setdefault(name, {})[str(count)] = {"tokens_per_second": speed}
        finally:
            process.terminate()
            process.wait()
    return result


def start(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a module of Python as a server."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-m", *command], **quiet)  # type: ignore[call-overload,no-any-return]  # noqa: S603


def measure_start(model: Path, threads: int, rounds: int) -> None:
    """Print when each server is ready, when it sends the first token, and its largest memory: medians of the rounds."""
    commands = {**SERVERS}
    commands["nucleate serve --batch-invariant"] = lambda *how: [*SERVERS["nucleate serve"](*how), "--batch-invariant"]
    body = json.dumps({"prompt": PROMPT, "max_tokens": 16, "stream": True}).encode()
    found: dict[str, list[tuple[float, float, float]]] = {}
    for _ in range(rounds):
        for port, (name, command) in enumerate(commands.items(), 8481):
            begin, url = time.perf_counter(), f"http://127.0.0.1:{port}/v1"
            process = start(command(model, threads, port))
            try:
                wait_until_ready(f"{url}/models", process)
                ready = time.perf_counter() - begin
                request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})  # noqa: S310
                with urllib.request.urlopen(request, timeout=600) as response:  # noqa: S310
                    next(line for line in response if b'"text"' in line)
                    first = time.perf_counter() - begin
                status = Path(f"/proc/{process.pid}/status").read_text("ascii")
                memory = int(status.split("VmHWM:")[1].split()[0]) / 1024
                found.setdefault(name, []).append((ready, first, memory))
            finally:
                process.terminate()
                process.wait()
    for name, rows in found.items():
        ready, first, memory = map(statistics.median, zip(*rows, strict=True))
        print(f"{name:<40} ready {ready:5.2f} s  first token {first:5.2f} s  memory {memory:6.0f} MiB")


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait for a server. Raises RuntimeError if it ends."""
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()  # noqa: S310
            return
        except OSError:
            check(process.poll() is None)
            time.sleep(0.02)


def measure(model: Path, threads: int, rounds: int, counts: list[int]) -> dict[str, Any]:
    """Tokens per second of each contender by the number of sequences, and the share outside llama_decode."""
    ours, single, many = Engine(model, threads), completion(model, threads), batched(model, threads)
    invariant = Engine(model, threads, batch_invariant=True)
    result: dict[str, Any] = {}
    for count in counts:
        times: dict[str, list[float]] = {}
        fractions: dict[str, list[float]] = {}
        contenders: dict[str, Callable[[], float]] = {
            "nucleate, greedy": lambda count=count: ours.run(count),
            "nucleate, temperature 0.8, top-p 0.95": lambda count=count: ours.run(count, 0.8),
            "batch-invariant nucleate, greedy": lambda count=count: invariant.run(count),
            "llama.cpp, batched pattern, greedy": lambda count=count: many(count),
        }
        if count == 1:
            contenders["llama-cpp-python, create_completion, greedy"] = lambda: single(0.0)
            contenders["llama-cpp-python, create_completion, temperature 0.8"] = lambda: single(0.8)
        for run in contenders.values():
            run()
        for _ in range(rounds):
            for name, run in contenders.items():
                times.setdefault(name, []).append(run())
                if name.startswith("nucleate"):
                    fractions.setdefault(name, []).append(ours.fraction)
        for name, measured in times.items():
            entry = result.setdefault(name, {})[str(count)] = {
                "tokens_per_second": round(count * TOKENS / statistics.median(measured), 1)
            }
            if name in fractions:
                entry["outside_llama_decode"] = round(statistics.median(fractions[name]), 4)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--start", action="store_true", help="measure only the start of the servers")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or write_model(Path(folder))
        if given.start:
            measure_start(model, given.threads, given.rounds)
            return
        result = measure(model, given.threads, given.rounds, given.counts)
        if importlib.util.find_spec("fastapi"):
            result |= measure_servers(model, given.threads, given.rounds, given.counts)
    for name, by_count in result.items():
        cells = "  ".join(f"{count}: {one['tokens_per_second']:7.1f}" for count, one in by_count.items())
        shares = "  ".join(f"{one['outside_llama_decode']:.1%}" for one in by_count.values() if len(one) > 1)
        print(f"{name:<55} {cells}  {shares}")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
