// OpenAI's SDK for Node.

import OpenAI from 'openai'
import { zodFunction, zodResponseFormat, zodTextFormat } from 'openai/helpers/zod'
import * as c from './checks.mjs'

const client = new OpenAI({ baseURL: `${c.SERVER}/v1`, apiKey: c.KEY })
const model = c.MODEL
const sampled = { temperature: 0.9, seed: 7, max_tokens: 16 }
const tools = [zodFunction({ name: 'get_weather', parameters: c.City, description: 'Get the weather.' })]

const asked = (question) => [{ role: 'user', content: question }]
const ask = (question = c.STORY, fields = {}) =>
  client.chat.completions.create({ model, messages: asked(question), ...fields })
const callsOf = (message) => message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments).city])
const runnable = (used) => [{
  type: 'function',
  function: {
    name: 'get_weather', description: 'Get the weather.', parse: JSON.parse,
    parameters: tools[0].function.parameters,
    function: ({ city }) => { used.push(city); return `Sunny in ${city}.` },
  },
}]

c.check('chat', async () => {
  const response = await ask(c.STORY, sampled)
  c.ok(response.choices[0].message.content)
  c.equal(response.usage.completion_tokens, 16)
})

c.check('stream', async () => {
  const chunks = await c.collect(await ask(c.STORY, { ...sampled, stream: true, stream_options: { include_usage: true } }))
  const text = chunks.flatMap((chunk) => chunk.choices).map((choice) => choice.delta.content ?? '').join('')
  c.equal(text, (await ask(c.STORY, sampled)).choices[0].message.content)
  c.equal(chunks.at(-1).usage.completion_tokens, 16)
})

c.check('completions', async () => {
  const given = { model, prompt: c.PROMPT, ...sampled }
  const chunks = await c.collect(await client.completions.create({ ...given, stream: true }))
  c.equal(chunks.map((chunk) => chunk.choices[0].text).join(''), (await client.completions.create(given)).choices[0].text)
})

c.check('stop', async () => {
  const choice = (await ask(c.STORY, { ...sampled, stop: ' a' })).choices[0]
  c.equal(choice.finish_reason, 'stop')
  c.ok((await ask(c.STORY, sampled)).choices[0].message.content.startsWith(`${choice.message.content} a`))
})

c.check('logprobs', async () => {
  const response = await ask(c.STORY, { ...sampled, logprobs: true, top_logprobs: 2 })
  c.equal(response.choices[0].logprobs.content.map((step) => step.top_logprobs.length), Array(16).fill(2))
})

c.check('parameters', async () => {
  const texts = await Promise.all([1, 2].map(async (seed) =>
    (await ask(c.STORY, { max_tokens: 16, seed, top_k: 1, min_p: 0.1 })).choices[0].message.content))
  c.equal(texts[0], texts[1])
})

c.check('schema', async () => {
  const given = { model, messages: asked('Who?'), response_format: zodResponseFormat(c.Hero, 'hero') }
  c.Hero.parse((await client.chat.completions.parse(given)).choices[0].message.parsed)
  const final = await client.chat.completions.stream(given).finalChatCompletion()
  c.Hero.parse(final.choices[0].message.parsed)
})

c.check('tool', async () => {
  const named = { type: 'function', function: { name: 'get_weather' } }
  for (const tool_choice of ['required', named]) {
    const given = { model, messages: asked(c.STORY), tools, tool_choice, parallel_tool_calls: false }
    const message = (await client.chat.completions.parse(given)).choices[0].message
    c.City.parse(message.tool_calls[0].function.parsed_arguments)
  }
})

c.check('auto', async () => {
  c.equal(callsOf((await ask(c.PARIS, { tools })).choices[0].message), [['get_weather', 'Paris']])
})

c.check('parallel', async () => {
  const calls = callsOf((await ask(c.BOTH, { tools })).choices[0].message)
  c.equal(calls, [['get_weather', 'Paris'], ['get_weather', 'Rome']])
})

c.check('streamed call', async () => {
  const stream = client.chat.completions.stream({ model, messages: asked(c.BOTH), tools })
  const calls = callsOf((await stream.finalChatCompletion()).choices[0].message)
  c.equal(calls, [['get_weather', 'Paris'], ['get_weather', 'Rome']])
})

c.check('loop', async () => {
  for (const stream of [false, true]) {
    const used = []
    const runner = client.chat.completions.runTools({ model, messages: asked(c.BOTH), tools: runnable(used), stream })
    c.equal(await runner.finalContent(), `${c.ANSWER} Sunny in Rome.`)
    c.equal(used.sort(), ['Paris', 'Rome'])
  }
}, 'with `runTools`')

c.check('reasoning', async () => {
  const { message } = (await ask(c.THINK)).choices[0]
  c.equal([message.reasoning_content, message.content], [c.THOUGHT, c.THOUGHT_ANSWER])
})

c.check('responses', async () => {
  const tool = { type: 'function', ...tools[0].function }
  const first = await client.responses.create({ model, input: c.PARIS, tools: [tool] })
  const call = first.output[0]
  c.equal(JSON.parse(call.arguments), { city: 'Paris' })
  const result = { type: 'function_call_output', call_id: call.call_id, output: c.SUNNY }
  const input = [{ role: 'user', content: c.PARIS }, call, result]
  const stream = client.responses.stream({ model, input, tools: [tool] })
  c.equal((await stream.finalResponse()).output_text, c.ANSWER)
  const parsed = await client.responses.parse({ model, input: 'Who?', text: { format: zodTextFormat(c.Hero, 'hero') } })
  c.Hero.parse(parsed.output_parsed)
})

c.check('errors', async () => {
  await c.rejects(ask(c.STORY, { temperature: -1 }), (error) => error instanceof OpenAI.BadRequestError && error.param === 'temperature')
  await c.rejects(ask(c.STORY, { model: 'other' }), OpenAI.NotFoundError)
})

await c.report('openai')
