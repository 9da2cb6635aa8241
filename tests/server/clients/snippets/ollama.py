from ollama import Client

client = Client(host="http://127.0.0.1:8000")
print(client.chat("nucleate-tiny", [{"role": "user", "content": "Tell me a story."}]).message.content)
