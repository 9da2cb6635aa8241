"""Serve several requests at once from asyncio, and cancel some of them.

AsyncEngine runs the engine on a thread. Cancelling the task of a request, or leaving the loop over its outputs, aborts
the request and frees its place in the batch and its KV cache. Prints two stories, the first sentence of a request that
was left then, and the result of a cancelled one.
"""

import asyncio

import nucleate as nc

llm = nc.LLM()


async def story(engine: nc.AsyncEngine, seed: int, **fields: object) -> str:
    params = nc.SamplingParams(temperature=0.8, seed=seed, **fields)
    return "".join([output.chunk.text async for output in engine.generate("Once upon a time", params)])


async def first_sentence(engine: nc.AsyncEngine) -> str:
    text = ""
    async for output in engine.generate("The dog", nc.SamplingParams(seed=1, max_tokens=500)):
        text += output.chunk.text
        if "." in text:
            break  # aborts the request
    return text


async def main() -> None:
    async with nc.AsyncEngine(llm.new_engine(max_num_seqs=8)) as engine:
        tasks = [asyncio.create_task(story(engine, seed, max_tokens=30)) for seed in (1, 2)]
        tasks.append(asyncio.create_task(first_sentence(engine)))
        tasks.append(asyncio.create_task(story(engine, 3, max_tokens=900, ignore_eos=True)))
        await asyncio.sleep(0.1)
        tasks[-1].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for name, result in zip(("story 1", "story 2", "first sentence", "cancelled"), results, strict=True):
            print(f"{name}: {result!r}")


asyncio.run(main())
