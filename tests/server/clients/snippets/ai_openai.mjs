import { createOpenAI } from '@ai-sdk/openai'
import { generateText } from 'ai'

const nucleate = createOpenAI({ baseURL: 'http://127.0.0.1:8000/v1', apiKey: 'any' })
console.log((await generateText({ model: nucleate('nucleate-tiny'), prompt: 'Tell me a story.' })).text)
