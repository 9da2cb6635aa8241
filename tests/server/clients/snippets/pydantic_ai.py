from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url="http://127.0.0.1:8000/v1", api_key="any")
print(Agent(OpenAIChatModel("nucleate-tiny", provider=provider)).run_sync("Tell me a story.").output)
