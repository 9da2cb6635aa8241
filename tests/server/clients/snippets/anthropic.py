from anthropic import Anthropic

client = Anthropic(base_url="http://127.0.0.1:8000", api_key="any")
messages = [{"role": "user", "content": "Tell me a story."}]
print(client.messages.create(model="nucleate-tiny", max_tokens=200, messages=messages).content[0].text)
