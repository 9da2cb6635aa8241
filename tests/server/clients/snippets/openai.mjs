import OpenAI from 'openai'

const client = new OpenAI({ baseURL: 'http://127.0.0.1:8000/v1', apiKey: 'any' })
const messages = [{ role: 'user', content: 'Tell me a story.' }]
const completion = await client.chat.completions.create({ model: 'nucleate-tiny', messages })
console.log(completion.choices[0].message.content)
