"""litellm: prints its results as one JSON object. Arguments: the server's URL, the model."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

PROMPT = "Once upon a time"
HELLO = [{"role": "user", "content": "Tell me a story about a cat."}]


async def streamed(fields: dict[str, Any]) -> str:
    stream = await litellm.acompletion(**fields, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def several(fields: dict[str, Any]) -> list[str]:
    responses = await asyncio.gather(*(litellm.acompletion(**{**fields, "seed": seed}) for seed in range(8)))
    return [response.choices[0].message.content for response in responses]


def failure(**fields: Any) -> str:
    try:
        litellm.completion(**fields)
    except Exception as error:  # noqa: BLE001  # which one is the question
        return type(error).__name__
    return "none"


def main(url: str, model: str) -> dict[str, Any]:
    server = {"api_base": f"{url}/v1", "api_key": "any", "num_retries": 0}
    chat = {**server, "model": f"openai/{model}", "messages": HELLO, "max_tokens": 16, "temperature": 0.9, "seed": 7}
    text = {key: value for key, value in chat.items() if key != "messages"}
    text |= {"model": f"text-completion-openai/{model}", "prompt": PROMPT}
    response = litellm.completion(**chat, logprobs=True, top_logprobs=2)
    chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks, messages=HELLO)
    return {
        "chat": response.choices[0].message.content,
        "finish_reason": response.choices[0].finish_reason,
        "usage": [response.usage.prompt_tokens, response.usage.completion_tokens],
        "logprobs": [len(step["top_logprobs"]) for step in response.choices[0].logprobs["content"]],
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "built": [built.choices[0].message.content, built.usage.prompt_tokens, built.usage.completion_tokens],
        "async": asyncio.run(streamed(chat)),
        "several": asyncio.run(several(chat)),
        "text": litellm.text_completion(**text).choices[0].text,
        "text streamed": "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**text, stream=True)),
        "own": litellm.completion(**chat, extra_body={"min_p": 0.02, "dry_multiplier": 0.8}).choices[0].message.content,
        "top_k": litellm.completion(**chat, top_k=1).choices[0].message.content,
        "n": [choice.message.content for choice in litellm.completion(**chat, n=2).choices],
        "unknown field": failure(**chat, extra_body={"temprature": 1}),
        "too long": failure(**{**chat, "messages": [{"role": "user", "content": "word " * 3000}]}),
        "unknown model": failure(**{**chat, "model": "openai/gpt-4o"}),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
