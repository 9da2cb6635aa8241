"""The engine on a GPU: the embedded model through torch, with equal tokens from all backends, and tokens per second."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_parts import Line, Part

PACKAGES = ["numba", "tokenizers", "transformers", "safetensors", "regex", "jinja2"]


def run(part: Part) -> None:
    """The embedded model through torch on the device: equal tokens from all backends, tokens/s, ``Sampler.loop``."""
    part.case("loop", lambda: loop(part))
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        part.put({"missing": f"the engine needs {', '.join(missing)}"})
        return
    made: list[Any] = []
    part.started.discard("load")  # in each process
    part.case("load", lambda: made.append(load(part)))
    if not made:
        return
    counts = (2,) if part.rehearse else (1, 32, 128)
    for count in counts:
        for backend in ("cpu", "triton", "torch"):
            part.case(f"{backend} {count}", lambda b=backend, c=count: generate(part, *made[0], b, c))


def load(part: Part) -> tuple[Any, Any]:
    """The runner of the embedded model on the device, and its tokenizer."""
    import nucleate as nc
    from nucleate.models.loader import EMBEDDED, runner_of
    from nucleate.models.transformers.transformers_model import TransformersModel
    from nucleate.tokenization.tokenizer import Tokenizer

    nc.warm()  # the kernels of the CPU
    runner: Any = runner_of(TransformersModel(EMBEDDED, part.device, "float32"), 1 << (26 if part.rehearse else 31))
    runner.asynchronous = True  # in a rehearsal too: tensors of logits, and overlap
    return runner, Tokenizer(EMBEDDED)


def generate(part: Part, runner: Any, tokenizer: Any, backend: str, count: int) -> Iterator[Line]:
    """Run ``count`` requests, all with the same stages and with five kinds; the tokens equal the first backend's."""
    import nucleate as nc
    from nucleate.engine.engine import Engine
    from nucleate.engine.request import Request

    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
        {"temperature": 0.0},
        {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.1},
        {"temperature": 1.2, "top_p": 0.95, "presence_penalty": 0.3, "dry_multiplier": 0.5},
        {"temperature": 0.9, "xtc_probability": 0.3, "xtc_threshold": 0.05},
    ]
    for kind, chosen in (("one pipeline", kinds[:1]), ("five pipelines", kinds)):
        lengths = (1, 2, 4) if part.rehearse else (8, 48, 200)
        spent = [0.0, 0.0, 0]
        for length in lengths:  # to compile, for the share outside the forward pass, for the speed
            made = Engine(runner, tokenizer, backend=backend, max_num_seqs=count)
            if length != lengths[-1]:
                spent = [0.0, 0.0, 0]
                runner.forward = clocked(type(runner).forward.__get__(runner), spent, part.device)
            tokens: dict[Any, list[int]] = {}
            begin = time.perf_counter()
            try:
                for index in range(count):
                    params = nc.SamplingParams(
                        **chosen[index % len(chosen)], seed=index, max_tokens=length, ignore_eos=True
                    )
                    prompt = tokenizer.encode("Once upon a time there was a little")
                    tokens[made.add(Request(prompt, params))] = []
                while len(made):
                    for event in made.step():
                        tokens[event.request_id] += event.chunk.token_ids
            finally:
                vars(runner).pop("forward", None)
            seconds = time.perf_counter() - begin
            if length != lengths[-1]:
                spent[1] = seconds
        rows = list(tokens.values())
        yield {
            "what": kind,
            "backend": backend,
            "sequences": count,
            "tokens_per_s": round(sum(map(len, rows)) / seconds, 1),
            "outside": f"{100 * max(0.0, 1 - spent[0] / spent[1]):.0f} %",
            "ms_per_step": round(1000 * spent[1] / max(1, spent[2]), 3),
        }
        first, expected = EXPECTED.setdefault((kind, count), (backend, rows))
        if first != backend:
            wrong = [index for index in range(count) if rows[index] != expected[index]]
            line: Line = {"what": f"{kind}, {count} sequences", "backend": f"{backend} and {first}", "equal": not wrong}
            if wrong:
                ours, theirs = rows[wrong[0]], expected[wrong[0]]
                at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), -1)
                line |= {"rows": len(wrong), "row": wrong[0], "step": at, "token": ours[at], "expected": theirs[at]}
            yield line


EXPECTED: dict[tuple[str, int], tuple[str, list[list[int]]]] = {}
"""The tokens of the first backend, by kind of requests and their number."""


def clocked(forward: Any, spent: list[Any], device: str) -> Any:
    """A forward pass that adds up its time. On a GPU it waits for the result, so steps do not overlap."""

    def run(inputs: Any) -> Any:
        import torch

        begin = time.perf_counter()
        out = forward(inputs)
        if device == "cuda":
            torch.cuda.synchronize()
        spent[0] += time.perf_counter() - begin
        spent[2] += 1
        return out

    return run


def loop(part: Part) -> Iterator[Line]:
    """``Sampler.loop`` with logits that depend on the last token, against single steps on the host."""
    import torch

    import nucleate as nc

    size, rows, steps = (300, 2, 3) if part.rehearse else (128_256, 32, 64)
    numbers = torch.Generator("cpu").manual_seed(1)
    table = (torch.randn(64, size, generator=numbers) * 3).to(part.device)
    for name in ("triton", "torch"):
        samplers = [nc.Sampler(size, name, device=part.device), nc.Sampler(size, "reference")]
        for sampler in samplers:
            for seed in range(rows):
                sampler.add(nc.SamplingParams(temperature=0.8, top_p=0.9, seed=seed), prompt_ids=[7])
        run = samplers[0].loop(lambda ids_R, _: table[ids_R % 64], [7] * rows, steps=steps)
        first = run()
        host, last, right = table.cpu().numpy(), [7] * rows, []
        for _ in range(min(steps, 8)):
            last = samplers[1](host[[token % 64 for token in last]]).token_ids.tolist()
            right.append(last)
        equal = first[:, : len(right)].T.tolist() == right
        yield {"what": f"Sampler.loop, {rows} sequences", "backend": f"{name} and reference", "equal": equal}
        if part.device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run().tolist()
        rate = round(rows * steps / (time.perf_counter() - begin), 1)
        yield {"what": f"Sampler.loop, V = {size}", "backend": name, "sequences": rows, "tokens_per_s": rate}
