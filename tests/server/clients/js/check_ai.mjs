// Vercel's AI SDK. Arguments after the model: the provider, @ai-sdk/openai-compatible or @ai-sdk/openai.

import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { APICallError, Output, ToolLoopAgent, generateText, isStepCount, streamText, tool } from 'ai'
import * as c from './checks.mjs'

const provider = process.argv[4]
const compatible = provider === '@ai-sdk/openai-compatible'
const server = { baseURL: `${c.SERVER}/v1`, apiKey: c.KEY }
const made = compatible
  ? createOpenAICompatible({ name: 'nucleate', supportsStructuredOutputs: true, includeUsage: true, ...server })
  : createOpenAI(server)
const model = made(c.MODEL)
const sampled = { temperature: 0.9, maxOutputTokens: 16, ...(compatible ? { seed: 7 } : {}) }

function weather(used = []) {
  const execute = async ({ city }) => { used.push(city); return `Sunny in ${city}.` }
  return { get_weather: tool({ description: 'Get the weather.', inputSchema: c.City, execute }) }
}

const onlyDescribed = { get_weather: tool({ description: 'Get the weather.', inputSchema: c.City }) }
const callsOf = (result) => result.toolCalls.map((call) => [call.toolName, call.input.city])

c.check('chat', async () => {
  const result = await generateText({ model, prompt: c.STORY, ...sampled })
  c.ok(result.text)
  c.equal([result.usage.outputTokens, result.finishReason], [16, 'length'])
}, compatible ? '' : 'on the Responses API, its default')

c.check('stream', async () => {
  const prompt = compatible ? c.STORY : c.THINK
  const given = { model, prompt, ...sampled, maxOutputTokens: compatible ? 16 : 60 }
  const result = streamText(given)
  const text = (await c.collect(result.textStream)).join('')
  c.equal(text, (await generateText(given)).text)
  c.ok((await result.usage).outputTokens > 0)
})

if (compatible) {
  c.check('completions', async () => {
    const given = { model: made.completionModel(c.MODEL), prompt: c.PROMPT, ...sampled }
    c.equal((await c.collect(streamText(given).textStream)).join(''), (await generateText(given)).text)
  }, '`completionModel`')
  c.check('stop', async () => {
    const result = await generateText({ model, prompt: c.STORY, ...sampled, stopSequences: [' a'] })
    c.equal(result.finishReason, 'stop')
    c.ok((await generateText({ model, prompt: c.STORY, ...sampled })).text.startsWith(`${result.text} a`))
  })
  c.check('parameters', async () => {
    const given = { model, prompt: c.STORY, maxOutputTokens: 16, providerOptions: { nucleate: { top_k: 1, min_p: 0.1 } } }
    c.equal((await generateText({ ...given, seed: 1 })).text, (await generateText({ ...given, seed: 2 })).text)
  }, 'as `providerOptions` under the name of the provider')
  c.absent('logprobs', 'no result has them')
  c.absent('responses', 'use `@ai-sdk/openai`')
} else {
  c.check('completions', async () => {
    const given = { model: made.completion(c.MODEL), prompt: c.PROMPT, ...sampled, seed: 7 }
    c.equal((await c.collect(streamText(given).textStream)).join(''), (await generateText(given)).text)
  }, '`.completion(model)`')
  c.check('stop', async () => {
    const given = { model: made.chat(c.MODEL), prompt: c.STORY, ...sampled, seed: 7 }
    const result = await generateText({ ...given, stopSequences: [' a'] })
    c.equal(result.finishReason, 'stop')
    c.ok((await generateText(given)).text.startsWith(`${result.text} a`))
  }, '`.chat(model)`: the Responses API has no field for it')
  c.absent('parameters', 'it sends OpenAI\'s fields only')
  c.check('logprobs', async () => {
    const result = await generateText({ model, prompt: c.STORY, ...sampled, providerOptions: { openai: { logprobs: 2 } } })
    c.equal(result.providerMetadata.openai.logprobs[0].map((step) => step.top_logprobs.length), Array(16).fill(2))
  })
  c.check('responses', async () => {
    const chat = made.chat(c.MODEL)
    c.equal((await generateText({ model: chat, prompt: c.PARIS, tools: weather(), stopWhen: isStepCount(3) })).text, c.ANSWER)
    c.Hero.parse((await generateText({ model: chat, prompt: 'Who?', output: Output.object({ schema: c.Hero }) })).output)
  }, 'its default; `.chat(model)` works too')
}

c.check('schema', async () => {
  const given = { model, prompt: 'Who?', output: Output.object({ schema: c.Hero }) }
  c.Hero.parse((await generateText(given)).output)
  const stream = streamText(given)
  await c.collect(stream.partialOutputStream)
  c.Hero.parse(await stream.output)
}, compatible ? 'with `supportsStructuredOutputs: true`' : '')

c.check('tool', async () => {
  for (const toolChoice of ['required', { type: 'tool', toolName: 'get_weather' }]) {
    const result = await generateText({ model, prompt: c.STORY, tools: onlyDescribed, toolChoice })
    c.equal(result.toolCalls[0].toolName, 'get_weather')
  }
})

c.check('auto', async () => {
  c.equal(callsOf(await generateText({ model, prompt: c.PARIS, tools: onlyDescribed })), [['get_weather', 'Paris']])
})

c.check('parallel', async () => {
  const result = await generateText({ model, prompt: c.BOTH, tools: onlyDescribed })
  c.equal(callsOf(result), [['get_weather', 'Paris'], ['get_weather', 'Rome']])
})

c.check('streamed call', async () => {
  const parts = await c.collect(streamText({ model, prompt: c.BOTH, tools: onlyDescribed }).fullStream)
  c.ok(parts.some((part) => part.type === 'tool-input-delta'))
  c.equal(parts.filter((part) => part.type === 'tool-call').map((part) => part.input.city), ['Paris', 'Rome'])
})

c.check('loop', async () => {
  for (const prompt of [c.PARIS, c.BOTH]) {
    const used = []
    const result = await new ToolLoopAgent({ model, tools: weather(used), instructions: 'Be brief.' }).generate({ prompt })
    c.equal(result.text, prompt === c.PARIS ? c.ANSWER : `${c.ANSWER} Sunny in Rome.`)
    c.equal(used.sort(), prompt === c.PARIS ? ['Paris'] : ['Paris', 'Rome'])
  }
  const streamed = streamText({ model, prompt: c.PARIS, tools: weather(), stopWhen: isStepCount(3) })
  c.equal((await c.collect(streamed.textStream)).join(''), c.ANSWER)
}, '`ToolLoopAgent`, or `stopWhen`')

c.check('reasoning', async () => {
  const providerOptions = { openai: { forceReasoning: true, reasoningSummary: 'auto' } }
  const given = { model, prompt: c.THINK, ...(compatible ? {} : { providerOptions }) }
  const result = await generateText(given)
  c.equal([result.reasoningText, result.text], [c.THOUGHT, c.THOUGHT_ANSWER])
  const parts = await c.collect(streamText(given).fullStream)
  const thought = parts.filter((part) => part.type === 'reasoning-delta').map((part) => part.text).join('')
  c.equal(thought, c.THOUGHT)
}, compatible ? '' : 'with `providerOptions: { openai: { forceReasoning: true, reasoningSummary: "auto" } }`')

c.check('errors', async () => {
  await c.rejects(generateText({ model, prompt: c.STORY, temperature: -1 }), (error) => APICallError.isInstance(error) && error.statusCode === 400)
  await c.rejects(generateText({ model: made('other'), prompt: c.STORY }), (error) => APICallError.isInstance(error) && error.statusCode === 404)
})

await c.report('ai', provider)
