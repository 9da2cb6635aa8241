// Programs that give the same output again: Python and curl; the link that holds the settings; a step as CSV.
import {toJson} from "./api.js";

/** A JSON value as a Python literal. */
function python(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([key, item]) => `${/^\d+$/.test(key) ? key : JSON.stringify(key)}: ${python(item)}`).join(", ")}}`;
}

/** The parameters that are set. */
function given({ params }) {
  return Object.entries(params).filter(([, value]) => value !== null && value !== undefined);
}

/** Python that gives the output of a run again. */
export function pythonOf(run, model) {
  const lines = given(run).map(([name, value]) => `    ${name}=${name === "seed" ? value : python(value)},\n`);
  const { messages, prompt } = run.input ?? {};
  const note = run.parent ? "# This gives the output from which the branch started.\n" : "";
  const call = messages ? `chat(${python(messages)}, params)` : `generate(${python(Array.isArray(prompt) ? [prompt] : (prompt ?? ""))}, params)[0]`;
  return `import nucleate\n\n${note}llm = nucleate.LLM()  # ${model}\nparams = nucleate.SamplingParams(\n${lines.join("")})\nprint(llm.${call}.text)\n`;
}

/** A curl command that gives the output of a run again. An API key is taken from the environment variable API_KEY. */
export function curlOf(run, model, server, needsKey) {
  const { messages, prompt } = run.input ?? {};
  const body = toJson({ model, ...(messages ? { messages } : { prompt }), ...Object.fromEntries(given(run)) }, 2);
  const key = needsKey ? "  -H \"Authorization: Bearer $API_KEY\" \\\n" : "";
  return `curl ${server}/v1/${messages ? "chat/" : ""}completions \\\n  -H 'Content-Type: application/json' \\\n${key}  -d '${body.replaceAll("'", "'\\''")}'\n`;
}

/** The hash of a link: prompt or messages, params, and the step to show, as base64url JSON. */
export function toHash({ prompt, messages }, params, step) {
  const bytes = new TextEncoder().encode(toJson({ ...(messages ? { messages } : { prompt }), params, step }));
  return `#s=${btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join("")).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "")}`;
}

/** The settings in a hash: {prompt, messages, params, step}; empty if there are none. A prompt is text or token ids. */
export function fromHash(hash, parse) {
  try {
    const raw = atob(/^#s=([\w-]+)$/.exec(hash)[1].replaceAll("-", "+").replaceAll("_", "/"));
    const { prompt, messages, params, step } = parse(new TextDecoder().decode(Uint8Array.from(raw, (c) => c.charCodeAt(0))));
    const chat = Array.isArray(messages) && messages.every(({ role, content }) => typeof role === "string" && typeof content === "string");
    const ids = Array.isArray(prompt) && prompt.every(Number.isSafeInteger);
    if (!chat && !ids && typeof prompt !== "string") return {};
    return { prompt: prompt ?? "", messages: chat ? messages : null, params: { ...params }, step: Number.isSafeInteger(step) ? step : null };
  } catch {
    return {};
  }
}

/** The step as CSV: a line per token, a column per stage. */
export function csvOf(view) {
  const quote = (text) => `"${String(text).replaceAll('"', '""')}"`;
  const heads = ["id", "text", "rank", ...view.stages.map((stage) => quote(stage.label))];
  const rows = view.tokens.map((t, i) => [t.id, quote(t.text), t.rank, ...view.stages.map((stage) => stage.p[i] ?? "")]);
  return [heads, ...rows].map((row) => `${row.join(",")}\r\n`).join("");
}
