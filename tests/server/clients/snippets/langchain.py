from langchain_openai import ChatOpenAI

llm = ChatOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="any", model="nucleate-tiny")
print(llm.invoke("Tell me a story.").content)
