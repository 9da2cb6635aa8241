// Branches: the tree of runs, and ways to start another one.
import {button, h, keepFocus, plural, put, quoted, uid, visible} from "./dom.js";
import {currentRun, currentToken} from "./state.js";
import {textOf} from "./text.js";

/** The runs in the order of the tree: [{run, depth}]. */
function treeOf(runs) {
  const all = [...runs.values()];
  const below = (parent, depth) => all.filter((run) => (run.parent?.run ?? null) === parent)
    .flatMap((run) => [{ run, depth }, ...below(run.id, depth + 1)]);
  return below(null, 0);
}

/** What a run is called, and its text. */
function nameOf(runs, run) {
  const first = [...runs.values()].filter((other) => !other.parent);
  if (!run.parent) return [`Output ${first.indexOf(run) + 1}`, textOf(run)];
  const { run: id, step } = run.parent;
  const [before, after] = [runs.get(id).tokens[step], run.tokens[step]];
  const changed = before && after && before.id !== after.id;
  const text = run.tokens.slice(step).map((t) => t.text).join("");
  return [changed ? `Step ${step}: ${quoted(after.text)} instead of ${quoted(before.text)}` : `From step ${step}`, text];
}

export function createTree(store, session, api) {
  const { state } = store;
  const list = h("ul.tree", { label: "Outputs and branches" });
  const id = uid();
  const text = h("textarea.input.text", { id, rows: 2, key: "branch text" });
  const go = button("Branch: go on with this text", () => session.branch(state.step, { text: text.value }));
  const label = h("label.label", { for: id });
  const editor = h("div.stack", label, text, h("div.tools", go));
  let filled = "";

  function item({ run, depth }) {
    const [name, content] = nameOf(state.runs, run);
    return h("li", { css: { "padding-left": `${20 * Math.min(depth, 8)}px` } },
      h("button.tree-button", { "aria-current": run.id === state.run && "true", key: run.id, onclick: () => session.showRun(run.id, run.parent?.step) },
        h("b", `${name} · ${plural(run.tokens.length, "token")} · seed ${run.params.seed}`),
        h("span.tree-text", visible(content.slice(0, 160)).replaceAll("·", " "))));
  }

  function showEditor() {
    const t = currentToken(state);
    editor.hidden = !t || !api.live;
    if (!t) return;
    label.textContent = `Text from step ${t.step} on`;
    const rest = currentRun(state).tokens.slice(t.step, t.step + 12).map(({ released }) => released).join("");
    if (text.value === filled) text.value = filled = rest;
    go.disabled = state.generating;
  }
  store.onFrame(["runs", "run", "tokens"], () => keepFocus(list, () => put(list, treeOf(state.runs).map(item))));
  store.on(["run", "step", "generating", "tokens"], showEditor);
  return h("div",
    h("p.help", "Choose a token in the stages and go on with it, or edit the text from this step on. A branch keeps the seed, so that only the change makes a difference."),
    editor, h("h3.subtitle", "Outputs and branches"), list);
}
