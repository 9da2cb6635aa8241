// What the programs check_*.mjs have in common: the same as ../checks.py, in JavaScript.

import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { z } from 'zod'

export const [SERVER, MODEL] = process.argv.slice(2)
export const KEY = 'any'
export const PROMPT = 'Once upon a time', STORY = 'Tell me a story about a cat.'
export const PARIS = 'What is the weather in Paris?', BOTH = 'What is the weather in Paris and Rome?'
export const THINK = 'Think first: is it sunny?', THOUGHT = 'The weather is a fact.', THOUGHT_ANSWER = 'It is sunny.'
export const SUNNY = 'Sunny in Paris.', ANSWER = `The tool says: ${SUNNY}`
export const Hero = z.strictObject({ name: z.enum(['Tom', 'Lily']), brave: z.boolean() })
export const City = z.strictObject({ city: z.enum(['Paris', 'Rome']) })

const checks = new Map(), results = {}

export function check(feature, run, note = '') {
  checks.set(feature, { run, note })
}

export function absent(feature, reason) {
  results[feature] = { status: 'absent', reason }
}

export const equal = assert.deepEqual
export const ok = assert.ok
export const rejects = assert.rejects

export async function collect(parts) {
  const made = []
  for await (const part of parts) made.push(part)
  return made
}

export async function report(...packages) {
  for (const [feature, { run, note }] of checks) {
    try {
      await run()
      results[feature] = { status: 'passed', reason: note }
    } catch (error) {
      console.error(feature, error)
      results[feature] = { status: 'failed', reason: String(error) }
    }
  }
  const version = (name) => JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version
  const versions = Object.fromEntries(packages.map((name) => [name, version(name)]))
  console.log(JSON.stringify({ versions, results }))
}
