"""langchain-openai: prints its results as one JSON object. Arguments: the server's URL, the model."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

PROMPT = "Once upon a time"
HELLO = "Tell me a story about a cat."


async def streamed(chat: ChatOpenAI) -> str:
    return "".join([str(chunk.content) async for chunk in chat.astream(HELLO)])


def failure(chat: ChatOpenAI, content: str = HELLO) -> list[str | None]:
    try:
        chat.invoke(content)
    except openai.APIStatusError as error:
        return [type(error).__name__, error.param]
    return []


def main(url: str, model: str) -> dict[str, Any]:
    fields = {"base_url": f"{url}/v1", "api_key": "any", "model": model, "seed": 7, "max_retries": 0}
    fields |= {"temperature": 0.9, "max_tokens": 16}
    chat = ChatOpenAI(**fields)
    response = chat.invoke(HELLO)
    chunks = list(ChatOpenAI(**fields, stream_usage=True).stream(HELLO))
    merged = chunks[0]
    for chunk in chunks[1:]:
        merged += chunk
    with_logprobs = (
        ChatOpenAI(**fields, logprobs=True, top_logprobs=2).invoke(HELLO).response_metadata["logprobs"]["content"]
    )
    scored = ChatOpenAI(**fields, logprobs=True)
    parts = [chunk.response_metadata.get("logprobs") for chunk in scored.stream(HELLO)]
    return {
        "chat": response.content,
        "finish_reason": response.response_metadata["finish_reason"],
        "usage": [response.usage_metadata["input_tokens"], response.usage_metadata["output_tokens"]],
        "streamed": merged.content,
        "streamed usage": [merged.usage_metadata["input_tokens"], merged.usage_metadata["output_tokens"]],
        "streamed finish_reason": merged.response_metadata["finish_reason"],
        "async": asyncio.run(streamed(chat)),
        "batch": [one.content for one in chat.batch([HELLO] * 4)],
        "several": [one.content for one in chat.batch([f"Tell me of a {thing}." for thing in ("dog", "hat", "boat")])],
        "logprobs": [len(step["top_logprobs"]) for step in with_logprobs],
        "streamed logprobs": sum(len(part["content"]) for part in parts if part),
        "conversation": chat.invoke([SystemMessage("Be brief."), HumanMessage(HELLO)]).content,
        "own": ChatOpenAI(**fields, extra_body={"min_p": 0.02, "dry_multiplier": 0.8}).invoke(HELLO).content,
        "stop": chat.invoke(HELLO, stop=[" "]).content,
        "text": OpenAI(**fields).invoke(PROMPT),
        "text streamed": "".join(OpenAI(**fields).stream(PROMPT)),
        "text batch": OpenAI(**fields).batch([PROMPT, PROMPT]),
        "unknown field": failure(ChatOpenAI(**fields, extra_body={"temprature": 1})),
        "too long": failure(chat, "word " * 3000),
        "unknown model": failure(ChatOpenAI(**{**fields, "model": "gpt-4o"})),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
