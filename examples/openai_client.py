"""Talk to the server with OpenAI's client. The script starts the server itself, on a free port.

Sampling parameters that OpenAI does not have go into `extra_body`, with nucleate's names. Prints a streamed answer,
then an answer that is one of two choices. Needs the extra server, and openai.
"""

import socket
import subprocess
import sys

from openai import OpenAI

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
server = subprocess.Popen([sys.executable, "-m", "nucleate", "serve", "--port", str(port), "--log-level", "warning"])
try:
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    model = client.with_options(max_retries=20).models.list().data[0].id  # retries until the server is ready
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    stream = client.chat.completions.create(
        model=model, messages=messages, seed=7, max_tokens=40, stream=True, extra_body={"min_p": 0.05}
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    messages = [{"role": "user", "content": "Is the fox happy?"}]
    constraint = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = client.chat.completions.create(model=model, messages=messages, seed=7, extra_body=constraint)
    print(f"{model}: {answer.choices[0].message.content}, {answer.usage.completion_tokens} tokens")
finally:
    server.terminate()
    server.wait()
