// Settings A and B on the same noise: the difference at the step, and where their texts part.
import {button, grid, h, percent, put, quoted, svg, token} from "./dom.js";
import {complete} from "./params.js";
import {currentRun} from "./state.js";
import {lastStage} from "./view.js";

const ROWS = 16;

/** The probabilities of two traces of one step: [{id, text, a, b}], the largest differences first. */
function differences(viewA, viewB) {
  const found = new Map();
  for (const [side, view] of [["a", viewA], ["b", viewB]]) {
    const { p } = view.stages[lastStage(view)];
    view.tokens.forEach(({ id, text }, i) => found.set(id, { id, text, a: 0, b: 0, ...found.get(id), [side]: p[i] ?? 0 }));
  }
  return [...found.values()].sort((x, y) => Math.abs(y.a - y.b) - Math.abs(x.a - x.b) || y.a - x.a);
}

function differenceBar({ a, b }, most) {
  const half = (48 * Math.abs(b - a)) / most;
  return svg("svg", { height: 18, "aria-hidden": "true" },
    svg("rect", { class: b < a ? "side-a" : "side-b", x: `${b < a ? 50 - half : 50}%`, width: `${half}%`, y: 3, height: 12, rx: 2 }),
    svg("line.axis", { x1: "50%", x2: "50%", y1: 0, y2: 18 }));
}

function differenceTable(viewA, viewB) {
  const all = differences(viewA, viewB).filter((entry) => entry.a || entry.b);
  const most = Math.abs(all[0].a - all[0].b) || 1;
  const moved = all.reduce((sum, entry) => sum + Math.abs(entry.a - entry.b), 0) / 2;
  const pickedBy = ({ id }) => [id === viewA.picked?.id && "A", id === viewB.picked?.id && "B"].filter(Boolean).join(" and ");
  const row = (entry) => [token(entry.text), percent(entry.a), differenceBar(entry, most), percent(entry.b), h("b", pickedBy(entry))];
  return [h("p.help", `Probabilities before the draw. Total variation distance over the likeliest tokens: ${percent(moved)}.`),
    grid("Difference of A and B", ["token", "#A", "~← more in A  |  more in B →", "#B", "picked by"], all.slice(0, ROWS).map(row))];
}

/** The step at which two lists of tokens part. */
function firstDifference(a, b) {
  let step = 0;
  while (step < Math.min(a.length, b.length) && a[step].id === b[step].id) step += 1;
  return step;
}

export function createCompare(store, session, api) {
  const { state } = store;
  let texts = []; // ids of the runs of A and B
  const [intro, body, prose] = [h("p.help"), h("div.stack"), h("div.stack")];
  const begin = button("Compare with second settings", () => store.set({ paramsB: { ...state.params }, editing: "B" }), "primary", { disabled: !api.live });
  const both = button("Generate both texts", generateBoth, "primary");
  const tools = h("div.tools", both, button("Swap A and B", () => store.set({ params: state.paramsB, paramsB: state.params })),
    button("End the comparison", () => store.set({ paramsB: null, editing: "A" })));

  async function generateBoth() {
    const run = currentRun(state);
    const [paramsA, paramsB, step] = [complete(state.params, run), complete(state.paramsB, run), state.step];
    const request = { input: run.input, parent: run.parent };
    const b = await session.generate({ ...request, params: paramsB }, { hidden: true });
    const a = b?.end && await session.generate({ ...request, params: paramsA }, { step });
    texts = a ? [a.id, b.id] : [];
    showTexts();
  }

  function textBox(run, part, side) {
    const from = Math.max(0, part - 40);
    const piece = (t) => h("span", { class: t.step === part ? `part part-${side}` : t.step < part && "muted" }, t.text);
    const show = button("Show", () => session.showRun(run.id, part), "small", { label: `Show the text of ${side.toUpperCase()}` });
    return h("div.stack", h("div.card-head", h("h3.subtitle", { class: `name-${side}` }, side.toUpperCase()), show),
      h("p.prose", from > 0 && "… ", run.tokens.slice(from, part + 200).map(piece)));
  }

  function showTexts() {
    const [a, b] = texts.map((id) => state.runs.get(id));
    prose.hidden = !a || !state.paramsB;
    if (prose.hidden) return;
    const part = firstDifference(a.tokens, b.tokens);
    const name = (t) => (t ? quoted(t.text) : "its end");
    const parts = `The texts part at step ${part}: A has ${name(a.tokens[part])}, B has ${name(b.tokens[part])}.`;
    put(prose, h("p.note", a.tokens[part] || b.tokens[part] ? parts : "Both settings give the same text."),
      h("div.columns", textBox(a, part, "a"), textBox(b, part, "b")));
  }

  function show() {
    const { paramsB, view, viewB, generating } = state;
    begin.hidden = Boolean(paramsB);
    tools.hidden = !paramsB;
    both.disabled = generating;
    intro.textContent = paramsB
      ? "Switch between A and B in the settings. Both have the same logits and the same noise at this step."
      : "Two settings side by side, on the same logits and the same noise. B begins as a copy of A; change it in the settings.";
    put(body, paramsB && (view && viewB ? differenceTable(view, viewB) : h("p.help", "There is no trace of this step to compare.")));
    showTexts();
  }
  store.on(["view", "viewB", "paramsB", "generating", "runs"], show);
  show();
  return h("div", intro, begin, tools, body, prose);
}
