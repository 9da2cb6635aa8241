// The fields of the request that belong to no stage: seed, draw, maximum number of tokens, stop strings.
import {button, h, put, uid} from "./dom.js";
import {randomSeed, valueOf} from "./params.js";
import {currentRun} from "./state.js";

const ESCAPES = { "\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\" };
const CHARACTERS = Object.fromEntries(Object.entries(ESCAPES).map(([character, written]) => [written, character]));

/** Stop strings as lines of text, with \n, \t and \\ written out; and back. */
function stopToText(stop) {
  return [stop ?? []].flat().map((item) => item.replace(/[\n\t\r\\]/g, (c) => ESCAPES[c])).join("\n");
}

function textToStop(text) {
  return text.split("\n").filter(Boolean).map((line) => line.replace(/\\[ntr\\]/g, (written) => CHARACTERS[written]));
}

/** A seed as the request needs it: a number, or digits if a number would lose some; null: random; undefined: none. */
function readSeed(text) {
  if (!/^\d{0,20}$/.test(text)) return undefined;
  return text === "" ? null : Number.isSafeInteger(Number(text)) ? Number(text) : text;
}

export function createRequestFields(settings, change, read, store) {
  const cells = {};
  function cell(name, input, ...more) {
    const error = h("span.field-error");
    cells[name] = { input, error };
    input.id = uid();
    input.setAttribute("data-key", name);
    return h("div.request-field", { class: `request-${name}` }, h("label.field-name", { for: input.id }, name), h("div.inline", input, ...more), error);
  }
  const seed = h("input.input", {
    inputmode: "numeric", autocomplete: "off",
    onchange() {
      const value = readSeed(seed.value.trim());
      if (value === undefined) cells.seed.error.textContent = "An integer from 0 to 2^64 − 1";
      else change("seed", value);
    },
  });
  const draw = h("select.select", { onchange: () => change("draw", draw.value) }, settings.draws.map((value) => h("option", { value }, value)));
  const tokens = h("input.input", {
    type: "number", min: 1, max: settings.limits.max_tokens,
    oninput: () => tokens.checkValidity() && change("max_tokens", tokens.value === "" ? null : Number(tokens.value)),
  });
  const stop = h("textarea.input", { rows: 1, spellcheck: "false", placeholder: "one per line; \\n: newline", onchange: () => change("stop", stop.value ? textToStop(stop.value) : null) });
  const another = button("New", () => change("seed", randomSeed()), "small", { tip: "New random seed" });
  const texts = { seed: (v) => String(v ?? ""), draw: (v) => v, max_tokens: (v) => String(v ?? ""), stop: stopToText };
  return {
    element: h("div.request", cell("seed", seed, another), cell("draw", draw), cell("max_tokens", tokens), cell("stop", stop)),
    update(params, problem) {
      seed.placeholder = String(currentRun(store.state)?.params.seed ?? "random");
      for (const [name, { input, error }] of Object.entries(cells)) {
        if (document.activeElement !== input || name === "draw") input.value = texts[name](valueOf(settings, params, name));
        put(error, problem?.param === name && problem.message);
      }
    },
  };
}
