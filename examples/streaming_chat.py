"""Stream a chat with stop strings, and keep the conversation.

Text that could be the beginning of a stop string is held back: no part of a stop string ever appears in the stream.
Prints two answers while they are generated, and the reason why each of them ended.
"""

import nucleate as nc

llm = nc.LLM()
params = nc.SamplingParams(temperature=0.7, seed=1, max_tokens=60, stop=["The end", ". One day"])
messages = []
for question in ("Tell me a story about a fox and a drum.", "Tell me a story about a cat and a hat."):
    messages.append({"role": "user", "content": question})
    print(f"user: {question}\nassistant: ", end="")
    text = ""
    for chunk in llm.stream_chat(messages, params):
        print(chunk.text, end="", flush=True)
        text += chunk.text
    print(f"\n[{chunk.finish_reason}, stop reason {chunk.stop_reason!r}]\n")
    messages.append({"role": "assistant", "content": text})
