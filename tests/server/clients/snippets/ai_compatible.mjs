import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText } from 'ai'

const nucleate = createOpenAICompatible({
  name: 'nucleate', baseURL: 'http://127.0.0.1:8000/v1', apiKey: 'any', supportsStructuredOutputs: true,
})
console.log((await generateText({ model: nucleate('nucleate-tiny'), prompt: 'Tell me a story.' })).text)
