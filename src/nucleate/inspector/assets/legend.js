// What colours the ribbon: the choice of a quantity, the legend with numbers, the marks, and a summary of the run.
import {choice, fixed, h, integer, put} from "./dom.js";
import {METRICS, histogram} from "./scales.js";
import {currentRun} from "./state.js";

const MARKS = [
  ["origin-given", "given by the branch", (t) => t.origin === "given"],
  ["origin-forced", "forced by the grammar", (t) => t.origin === "forced"],
  ["origin-draft", "accepted draft", (t) => t.origin === "draft"],
  ["has-rejected", "draft rejected here", (t) => t.rejected?.length],
  ["held", "held back for a while", (t, mark) => mark?.held],
  ["cut", "not part of the text", (t, mark) => mark?.cut],
];
const ENDS = { stop: "stopped", length: "maximum number of tokens" };

/** The choice of the quantity, and one line of numbers about the run. */
export function createRibbonHead(store) {
  const options = Object.entries(METRICS).map(([name, { label }]) => [name, label]);
  const summary = h("p.summary");
  store.onFrame(["tokens", "run", "generating"], (state) => {
    const run = currentRun(state);
    if (!run) return;
    const known = run.tokens.filter((t) => t.surprisal !== null);
    const mean = known.reduce((sum, t) => sum + t.surprisal, 0) / (known.length || 1);
    const { finish_reason: finish, stop_reason: stop } = run.end ?? {};
    const end = run.end ? `${ENDS[finish] ?? finish}${typeof stop === "string" ? ` at ${JSON.stringify(stop)}` : ""}` : state.generating ? "generating …" : "incomplete";
    const items = { tokens: integer(run.tokens.length), "mean surprisal": `${fixed(mean, 2)} nats`, perplexity: fixed(Math.exp(mean), 2), seed: run.params.seed, end };
    put(summary, Object.entries(items).map(([name, value]) => h("span", h("span.muted", `${name} `), String(value))));
  });
  return h("div.ribbon-head", choice("Colour by", options, (metric) => store.set({ metric }))[0], summary);
}

/** The legend, with the number of tokens of each class. */
export function createLegend(store) {
  const box = h("div.legend");
  store.onFrame(["tokens", "run", "metric"], (state) => {
    const run = currentRun(state);
    if (!run) return;
    const { label, help, labels } = METRICS[state.metric];
    const counts = histogram(state.metric, run.tokens);
    const most = Math.max(...counts, 1);
    const levels = labels.map((text, level) => text && h("li.legend-class",
      h("span.legend-bar", { "aria-hidden": "true" }, h("span.legend-fill", { class: `level-${level}`, css: { height: `${(100 * counts[level]) / most}%` } })),
      h("span.swatch", { class: `level-${level}` }), h("span", text), h("span.legend-count", { title: "tokens" }, integer(counts[level]))));
    const marks = MARKS.filter(([, , applies]) => run.tokens.some((t) => applies(t, run.book.marks[t.step])));
    put(box, h("ul.legend-classes", { label: `${label}: classes and number of tokens` }, levels),
      h("div.legend-side", h("p.help", help), marks.length > 0 && h("ul.marks", { label: "Marks" }, marks.map(([name, text]) =>
        h("li", h("span.piece.mark", { class: name, "aria-hidden": "true" }, "abc"), text)))));
  });
  return box;
}
