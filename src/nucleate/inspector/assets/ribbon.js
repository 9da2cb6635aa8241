// The token ribbon: the prompt and the output as coloured tokens. Only the visible lines are in the document.
import {fixed, h, integer, percent, quoted, uid, visible} from "./dom.js";
import {LineLayout} from "./lines.js";
import {levelOf} from "./scales.js";
import {currentRun} from "./state.js";
import {remarks} from "./text.js";

const LINE = 32; // pixels of a line
const GAP = 5; // padding and margin of a token, both sides
const SIDES = 26; // padding of the ribbon, both sides
const SPARE = 6; // lines that are kept above and below the visible ones

/** A token as a sentence, for tooltips and screen readers. */
function describeToken(run, t) {
  const parts = [`Step ${t.step}: ${quoted(t.text)}`];
  if (t.model_probability !== null) {
    parts.push(`model probability ${percent(t.model_probability)}, rank ${integer(t.rank)}`);
    parts.push(`surprisal ${fixed(t.surprisal, 2)} nats, entropy ${fixed(t.entropy, 2)} nats`);
  }
  if (t.probability !== null) parts.push(`sampled with probability ${percent(t.probability)} from ${integer(t.kept)} tokens`);
  return [...parts, ...remarks(run, t)].join("; ");
}

export function createRibbon(store, session) {
  const { state } = store;
  const base = uid();
  const lines = h("div.lines", { role: "none" });
  const box = h("div.ribbon", { role: "listbox", tabindex: 0, label: "Tokens of the prompt and the output", key: "ribbon" }, lines);
  const pen = document.createElement("canvas").getContext("2d");
  const widths = new Map();
  const drawn = new Map(); // line -> element
  let run = null;
  let followed = false; // whether the box scrolled with the tokens
  let layout = new LineLayout(0, () => 0);

  function widthOf(text) {
    if (!widths.has(text)) widths.set(text, Math.min(pen.measureText(text).width + GAP, layout.width));
    return widths.get(text);
  }

  function add(t, given) {
    layout.add({ t, given, text: visible(t.text).replaceAll("·", "\u00a0"), breaks: t.text.endsWith("\n") });
  }

  /** Lay out the run from its beginning. */
  function restart() {
    run = currentRun(state);
    followed = false;
    const { fontSize, fontFamily } = getComputedStyle(box);
    pen.font = `${fontSize} ${fontFamily}`;
    widths.clear();
    layout = new LineLayout(box.clientWidth - SIDES, widthOf);
    for (const t of run?.start.prompt ?? []) add(t, true);
    redraw();
    append();
  }

  /** Lay out the tokens that are new. */
  function append() {
    if (!run) return;
    const line = layout.count - 1;
    const follows = state.generating && box.scrollTop + box.clientHeight >= box.scrollHeight - LINE;
    for (let i = layout.items.length - run.start.prompt.length; i < run.tokens.length; i += 1) add(run.tokens[i], false);
    lines.style.setProperty("height", `${layout.count * LINE}px`);
    for (const at of [...drawn.keys()]) if (at >= line) forget(at);
    if (follows) {
      box.scrollTop = box.scrollHeight;
      followed = true;
    }
    draw();
  }

  function forget(line) {
    drawn.get(line)?.remove();
    drawn.delete(line);
  }

  function redraw() {
    for (const line of [...drawn.keys()]) forget(line);
    draw();
  }

  /** Draw the visible lines that are missing, and drop those far away. */
  function draw() {
    const low = Math.max(0, Math.floor(box.scrollTop / LINE) - SPARE);
    const high = Math.min(layout.count - 1, Math.ceil((box.scrollTop + box.clientHeight) / LINE) + SPARE);
    for (const line of [...drawn.keys()]) if (line < low || line > high) forget(line);
    for (let line = low; line <= high; line += 1) {
      if (drawn.has(line)) continue;
      const element = h("div.line", { role: "none", css: { top: `${line * LINE}px` } }, layout.itemsOf(line).map(piece));
      const after = Math.min(...[...drawn.keys()].filter((other) => other > line));
      lines.insertBefore(element, drawn.get(after) ?? null);
      drawn.set(line, element);
    }
    markActive();
  }

  function markActive() {
    const chosen = box.querySelector("[aria-selected=true]");
    if (chosen) box.setAttribute("aria-activedescendant", chosen.id);
    else box.removeAttribute("aria-activedescendant");
  }

  function piece({ t, given, text }) {
    const label = given ? `Prompt: ${quoted(t.text)}` : describeToken(run, t);
    return h("span.piece", { role: "option", id: given ? null : `${base}-${t.step}`, class: given ? "prompt-piece" : classesOf(t), "aria-selected": !given && t.step === state.step ? "true" : "false", "aria-disabled": given ? "true" : null, tip: label, "data-step": given ? null : t.step }, text);
  }

  function classesOf(t) {
    const mark = run.book.marks[t.step];
    const level = levelOf(state.metric, t);
    const held = mark?.cut ? "cut" : mark?.held ? "held" : "";
    return `${level === null ? "no-level" : `level-${level}`} origin-${t.origin} ${held} ${t.rejected?.length ? "has-rejected" : ""}`;
  }

  function showChosen() {
    for (const old of box.querySelectorAll("[aria-selected=true]")) old.setAttribute("aria-selected", "false");
    if (state.step === null || !run) return;
    const top = layout.lineOf(state.step + run.start.prompt.length) * LINE;
    if (top < box.scrollTop) box.scrollTop = top;
    if (top + LINE > box.scrollTop + box.clientHeight) box.scrollTop = top + LINE - box.clientHeight + 16;
    draw();
    box.querySelector(`[data-step="${state.step}"]`)?.setAttribute("aria-selected", "true");
    markActive();
  }

  function below(count) {
    const given = run.start.prompt.length;
    return layout.below(state.step + given, count) - given;
  }

  box.addEventListener("keydown", (event) => {
    if (state.step === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(box.clientHeight / LINE) - 1);
    const targets = {
      ArrowLeft: () => state.step - 1,
      ArrowRight: () => state.step + 1,
      ArrowUp: () => below(-1),
      ArrowDown: () => below(1),
      PageUp: () => below(-page),
      PageDown: () => below(page),
      Home: () => 0,
      End: () => run.tokens.length - 1,
    };
    if (!(event.key in targets)) return;
    event.preventDefault();
    session.select(targets[event.key]());
    showChosen(); // also if it was chosen before and is out of sight
  });
  box.addEventListener("click", (event) => {
    const step = event.target.getAttribute("data-step");
    if (step !== null) session.select(Number(step));
  });
  let waiting = false;
  box.addEventListener("scroll", () => {
    if (!waiting) requestAnimationFrame(() => ((waiting = false), draw()));
    waiting = true;
  });
  new ResizeObserver(() => {
    if (Math.abs(box.clientWidth - SIDES - layout.width) < 1) return;
    restart();
    showChosen();
  }).observe(box);
  store.on(["tokens", "run", "metric", "generating", "step"], (_, keys) => {
    const other = run !== currentRun(state);
    if (other) {
      box.scrollTop = 0;
      restart();
    } else if (keys.has("tokens")) append();
    if (keys.has("metric") || keys.has("generating")) redraw();
    if (other && state.generating && !run?.parent && state.runs.size > 1) box.scrollIntoView({ block: "nearest" }); // on a phone, the button is far away
    if (other || keys.has("step") || (followed && keys.has("generating") && !state.generating)) showChosen();
  });
  return box;
}
