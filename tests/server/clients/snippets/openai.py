from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="any")
messages = [{"role": "user", "content": "Tell me a story."}]
print(client.chat.completions.create(model="nucleate-tiny", messages=messages).choices[0].message.content)
