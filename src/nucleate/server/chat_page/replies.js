// Replies: the request for one, its stream, and which token wrote which part of its text.
import {toHash} from "./code.js";
import {randomSeed, withCompleteOrder} from "./params.js";
import {addNode, pathOf} from "./conversations.js";

const TOP = 5; // alternatives per token that are requested
const SAVE_MS = 3000;
const TEXT_TOKENS = 256; // the default of a text completion: that of the API, 16, is too short to read

/** A message as the API takes it. */
function messageOf(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, content: node.content };
  if (node.role === "user") return { role: "user", content: node.content };
  const calls = (node.calls ?? []).map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  const made = { role: "assistant", content: calls.length && !node.content ? null : node.content };
  if (node.reasoning && calls.length) made.reasoning_content = node.reasoning;
  return calls.length ? { ...made, tool_calls: calls } : made;
}

/** What goes into a request for the reply `node`: {messages} or {prompt}. */
function inputOf(conversation, node) {
  const path = pathOf(conversation, node.parent);
  if (conversation.mode === "text") return { prompt: path.map((each) => each.content).join("") + node.content };
  const system = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  const started = node.content ? [{ role: "assistant", content: node.content }] : [];
  return { messages: [...system, ...path.map(messageOf), ...started] };
}

function bytesOf(text) {
  return Array.from(text.slice(6).matchAll(/\\x(..)/g), ([, hex]) => parseInt(hex, 16));
}

/** A token of a chat's stream. */
function chatToken({ token: text, bytes, logprob, token_id: id, rank, top_logprobs: top }) {
  const made = { text, logprob, id, rank, top: top.map((other) => ({ text: other.token, logprob: other.logprob, id: other.token_id })) };
  return text.includes("\ufffd") ? { ...made, bytes } : made;
}

/** The tokens of a stream of text completion, whose logprobs are columns. */
function textTokens({ tokens, token_logprobs: logprobs, top_logprobs: tops }, ids) {
  return tokens.map((text, i) => {
    const top = Object.entries(tops[i] ?? {}).map(([other, logprob]) => ({ text: other, logprob, id: null })).sort((a, b) => b.logprob - a.logprob);
    const at = top.findIndex((other) => other.text === text);
    const made = { text, logprob: logprobs[i], id: ids[i] ?? null, rank: at >= 0 && at < TOP ? at + 1 : null, top: top.slice(0, TOP) };
    return text.startsWith("bytes:\\x") ? { ...made, text: "\ufffd", bytes: bytesOf(text) } : made;
  });
}

function takeCalls(node, deltas) {
  for (const { index, id, function: part } of deltas) {
    const call = (node.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name ||= part?.name ?? "";
    call.arguments += part?.arguments ?? "";
  }
}

/** Add a chunk of a stream to a reply. */
function takeChunk(node, chunk) {
  if (chunk.error) throw Object.assign(new Error(chunk.error.message), chunk.error);
  if (chunk.usage) node.usage = chunk.usage;
  const [choice] = chunk.choices;
  node.promptIds ??= chunk.prompt_token_ids ?? choice?.prompt_token_ids;
  if (!choice) return;
  const { delta = { content: choice.text }, logprobs } = choice;
  node.content += delta.content ?? "";
  node.reasoning += delta.reasoning_content ?? "";
  if (delta.tool_calls) takeCalls(node, delta.tool_calls);
  if (logprobs?.content) node.tokens.push(...logprobs.content.map(chatToken));
  else if (logprobs?.tokens) node.tokens.push(...textTokens(logprobs, choice.token_ids ?? []));
  node.seed ??= choice.seed;
  node.finish = choice.finish_reason ?? node.finish;
}

const encoder = new TextEncoder();
const places = new WeakMap(); // reply -> {raw, starts, decoder}

/** The text of all tokens of a reply, and where each begins in it: a character belongs to the token that completes it. */
function rawOf(node) {
  if (!places.has(node) || places.get(node).starts.length > node.tokens.length) places.set(node, { raw: "", starts: [], decoder: new TextDecoder("utf-8", { ignoreBOM: true }) });
  const made = places.get(node);
  for (let i = made.starts.length; i < node.tokens.length; i += 1) {
    made.starts.push(made.raw.length);
    const { bytes, text } = node.tokens[i];
    made.raw += made.decoder.decode(bytes ? Uint8Array.from(bytes) : encoder.encode(text), { stream: true });
  }
  return made;
}

/** Where the tokens of a reply begin in a part of it: the place of each token, and after the last one. null: unknown. */
export function tokenStarts(node, part) {
  if (!node.tokens?.length) return null;
  const { raw, starts } = rawOf(node);
  const given = part === "content" ? node.given : 0;
  const wanted = node[part].slice(given, given + 200);
  const reasoned = node.reasoning && part === "content" ? Math.max(0, raw.indexOf(node.reasoning.slice(0, 200))) + node.reasoning.length : 0;
  const at = raw.indexOf(wanted, reasoned);
  if (at < 0 || !wanted) return null;
  return [...starts, raw.length].map((start) => start - at + given);
}

/** Where a token is in the text of a reply, or -1: a special token, or part of something else. */
export function placeOf(node, step) {
  const starts = tokenStarts(node, "content");
  return starts && starts[step] >= node.given && starts[step] < node.content.length ? starts[step] : -1;
}

/** The link to the inspector with the same prompt, settings and seed, at a token. */
export function inspectorLink(conversation, node, step) {
  const first = node.tokens.length - node.own; // tokens before were given
  const params = { ...node.params, seed: node.seed, max_tokens: Math.max(1, node.own) };
  const input = node.plain ? inputOf({ ...conversation, system: node.system }, { ...node, content: "" }) : { prompt: node.promptIds ?? [] };
  return `inspector${toHash(input, params, step - first)}`;
}

/** The actions that generate. persist(conversation): called to keep it. */
export function createReplies(store, api, persist) {
  const { state } = store;
  const running = new Map(); // conversation id -> {abort, node}
  let top = Math.min(TOP, state.settings.limits.max_logprobs);

  const nodeOf = (conversation) => running.get(conversation?.id)?.node ?? null;

  function bodyOf(conversation, node) {
    const input = inputOf(conversation, node);
    const body = { ...input, ...node.params, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
    if (conversation.mode === "text" && !("max_tokens" in { ...state.settings.defaults, ...body })) body.max_tokens = TEXT_TOKENS;
    if (conversation.mode === "text") return top ? { ...body, logprobs: top } : body;
    if (top) Object.assign(body, { logprobs: true, top_logprobs: top });
    if (node.content) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    if (state.tools.length && state.settings.model.tools) body.tools = state.tools;
    return body;
  }

  /** Generate the rest of a reply, which may have some text. */
  async function fill(conversation, node) {
    const abort = new AbortController();
    const seed = state.params.seed ?? randomSeed();
    const { model } = state.settings;
    const begun = node.tokens.length;
    const began = performance.now();
    let saved = began;
    node.system = conversation.system; // it may change later
    node.params = withCompleteOrder(state.settings, { ...state.params, seed });
    node.plain = conversation.mode === "text" ? true : !node.content && !model.reasoning && !state.tools.length && pathOf(conversation, node.parent).every(({ role, calls }) => role !== "tool" && !calls?.length);
    if (conversation.mode === "text" && node.content) node.plain = false;
    running.set(conversation.id, { abort, node });
    store.set({ problem: null, status: "Generating …" });
    store.touch("chat");
    const takeEvent = (chunk) => {
      takeChunk(node, chunk);
      node.own = node.tokens.length - begun;
      node.milliseconds = performance.now() - began;
      if (performance.now() - saved > SAVE_MS) {
        saved = performance.now();
        persist(conversation);
      }
      store.touch("reply");
    };
    try {
      await api.stream(`v1/${conversation.mode === "text" ? "" : "chat/"}completions`, bodyOf(conversation, node), takeEvent, abort.signal);
    } catch (error) {
      if (error.name === "AbortError") node.finish = "stopped";
      else if (error.status === 401) store.set({ problem: { kind: "key", message: error.message, param: null } });
      else if (top && /logprobs/.test(error.param ?? "")) {
        top = 0; // this server sends none
        running.delete(conversation.id);
        return fill(conversation, node);
      } else {
        const [param] = (error.param ?? "").split(".");
        if (param in state.params) store.set({ problem: { kind: "other", message: error.message, param } });
      }
      if (error.name !== "AbortError") node.error = error.message;
    }
    running.delete(conversation.id);
    const count = node.usage?.completion_tokens ?? node.own;
    store.set({ status: node.error ? `No reply: ${node.error}` : `${count} tokens generated.` });
    store.touch("chat", "reply");
    return persist(conversation);
  }

  /** Add a reply after a message, and generate it. started: text and tokens with which it begins. */
  function reply(conversation, parent, started = {}) {
    if (nodeOf(conversation)) return null;
    const node = addNode(conversation, parent, { role: "assistant", reasoning: "", calls: [], tokens: [], seed: null, finish: null, usage: null, params: {}, given: 0, own: 0, milliseconds: 0, ...started });
    persist(conversation);
    return fill(conversation, node);
  }

  return {
    nodeOf,
    reply,
    stop: (conversation) => running.get(conversation?.id)?.abort.abort(),

    /** A new version of a reply that has its text before a token, goes on with another one, and then as it comes. */
    branch(conversation, node, step, text) {
      const at = placeOf(node, step);
      if (at < 0) return null;
      const given = { text, logprob: 0, id: null, rank: null, top: [], chosen: true };
      const found = node.tokens[step].top.find((other) => other.text === text);
      const token = { ...given, ...(found ?? {}), rank: found ? node.tokens[step].top.indexOf(found) + 1 : null, top: node.tokens[step].top };
      return reply(conversation, node.parent, { content: node.content.slice(0, at) + text, reasoning: "", given: node.given, tokens: [...node.tokens.slice(0, step), token] });
    },

    /** A new version of a reply that begins with all its text. */
    goOn(conversation, node) {
      const { content, tokens, given } = node;
      return reply(conversation, node.parent, { content, given: tokens.length ? given : content.length, tokens: [...tokens] });
    },
  };
}
