"""Single-request throughput of the embedded model in a fresh process, before and after its kernels are loaded.

Each line is one output of 100 tokens: tokens per second of CPU time of the process. Kernels are loaded from the cache
before the first output. Without a cache, a background process compiles them within seconds (``jit/native_library.py``).

    python benchmarks/alone.py
"""

from __future__ import annotations

from time import process_time

import nucleate as nc

TOKENS = 100


def main() -> None:
    llm = nc.LLM()
    params = nc.SamplingParams(
        temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=1, max_tokens=TOKENS, ignore_eos=True
    )
    for output in range(8):
        begin = process_time()
        llm.generate("Once upon a time", params)
        print(f"output {output + 1}: {TOKENS / (process_time() - begin):.0f} tokens/s")


if __name__ == "__main__":
    main()
