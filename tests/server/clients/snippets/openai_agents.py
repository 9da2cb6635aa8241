from agents import Agent, Runner, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI

set_default_openai_client(AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="any"))
set_tracing_disabled(True)  # traces are sent to OpenAI
print(Runner.run_sync(Agent(name="Writer", model="nucleate-tiny"), "Tell me a story.").final_output)
