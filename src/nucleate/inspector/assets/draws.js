// Many draws of the next token with different seeds, beside the exact distribution.
import {button, fixed, grid, h, integer, percent, plural, put, signed, svg, token, uid} from "./dom.js";
import {complete} from "./params.js";
import {chiSquareTail} from "./scales.js";
import {currentRun, sourceOf} from "./state.js";

/** The expected count with its two-sigma whiskers, and the observed count. */
function countBar({ count, expected, sigma }, most) {
  const at = (x) => `${((97 * Math.max(0, x)) / most).toFixed(2)}%`;
  const ends = [expected - 2 * sigma, expected + 2 * sigma];
  const outside = Math.abs(count - expected) > 2 * sigma;
  return svg("svg", { height: 22, "aria-hidden": "true" },
    svg("rect.expected", { x: 0, width: at(expected), y: 5, height: 12, rx: 2 }),
    svg("line.whisker", { x1: at(ends[0]), x2: at(ends[1]), y1: 11, y2: 11 }),
    ends.map((x) => svg("line.whisker", { x1: at(x), x2: at(x), y1: 7, y2: 15 })),
    svg("circle", { class: outside ? "observed-out" : "observed", cx: at(count), cy: 11, r: 4 }));
}

function verdict({ chi_square: x, degrees_of_freedom: degrees }) {
  if (x === null) return "A key of a watermark decides the draw, not the seed.";
  if (!degrees) return "Only one token can be drawn.";
  const p = chiSquareTail(x, degrees);
  const words = p < 0.05 ? `exact draws deviate as much in 1 of ${integer(Math.round(1 / p))} cases` : "the draws agree with the distribution";
  return `χ² = ${fixed(x, 2)} with ${plural(degrees, "degree")} of freedom, p = ${p < 0.001 ? p.toExponential(1) : fixed(p)}: ${words}.`;
}

export function createDraws(store, session, api) {
  const { state } = store;
  const id = uid();
  const number = h("input.input.number-input", { type: "number", id, min: 1, max: state.settings.limits.max_draws, value: 1000, key: "draws" });
  const result = h("div.stack", { "aria-live": "polite" });
  let abort = null;

  async function drawMany() {
    if (!number.reportValidity()) return;
    const run = currentRun(state);
    abort?.abort();
    abort = new AbortController();
    go.disabled = true;
    put(result, h("p.help", "Drawing …"));
    try {
      const body = { run: sourceOf(state.runs, run, state.step)?.id, step: state.step, params: complete(state.params, run), count: Number(number.value) };
      showResult(await api.draws(body, abort.signal));
    } catch (error) {
      if (error.name !== "AbortError") put(result, h("p.field-error", error.message));
    }
    go.disabled = !api.live;
  }
  const go = button("Draw", drawMany, "primary", { disabled: !api.live });

  function showResult({ drawn, count, tokens, rest, first_seed: first, ...test }) {
    const complement = rest.probability > 0 ? [{ ...rest, others: true }] : [];
    const entries = [...tokens, ...complement].map((entry) => ({
      ...entry, expected: drawn * entry.probability, sigma: Math.sqrt(drawn * entry.probability * (1 - entry.probability)),
    }));
    const most = Math.max(1, ...entries.map((entry) => (entry.others ? 0 : Math.max(entry.count, entry.expected + 2 * entry.sigma))));
    const row = (entry) => [entry.others ? "others" : token(entry.text), percent(entry.probability), fixed(entry.expected, 1), integer(entry.count),
      `${signed((entry.count - entry.expected) / (entry.sigma || 1), 1)}σ`, !entry.others && countBar(entry, most)];
    const limit = drawn < count ? ` The time limit allowed ${integer(drawn)} of ${integer(count)} draws.` : "";
    put(result, h("p.note", verdict(test)),
      grid("Counts beside the exact distribution", ["token", "#exact", "#expected", "#drawn", "#deviation", "~▬ expected  ├┤ ±2σ  ● drawn"], entries.map(row)),
      h("p.help", `Seeds ${first} to ${BigInt(first) + BigInt(drawn) - 1n}.${limit}`));
  }
  store.on(["run", "step", "params", "view"], (_, keys) => {
    go.disabled = !api.live || !state.view;
    if (keys.size === 1 && keys.has("view")) return;
    abort?.abort();
    put(result);
  });
  return h("div",
    h("p.help", "Samples the token of this step again with many seeds, under the settings, and counts. The counts should agree with the exact distribution."),
    h("div.tools", h("label.label", { for: id }, "Number of draws"), number, go), result);
}
