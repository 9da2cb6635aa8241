// The stage ladder: one row per stage, one column per token, so that the eye follows a token down.
import {button, choice, fixed, h, integer, keepFocus, percent, put, quoted, scroller, token} from "./dom.js";
import {currentToken} from "./state.js";
import {barHeight, columnsOf, lastStage, mostOf, pathOf, removedAt, restOf, titleOf} from "./view.js";

const FIXED = 476; // pixels of the columns beside those of the tokens
const COLUMN = 48; // pixels of the column of a token

export function createLadder(store, session, api) {
  const { state } = store;
  const table = h("table.ladder");
  const region = scroller("Stages of this step", table);
  const detail = h("div.detail");
  const [countBox, count] = choice("Tokens", [["fit", "that fit"], ["40", "40"]], show);
  const [scaleBox, scale] = choice("Bars", ["linear", ["log", "logarithmic"]], show);
  const box = h("div", { hidden: true }, h("div.tools.end", countBox, scaleBox), region, detail);
  let most = 1; // the probability of the highest bar

  function bar(p, kind = "") {
    return h("span.bar-box", h("span.bar", { class: kind, css: { height: `${100 * barHeight(p, scale.value, most)}%` } }));
  }

  function headOf(t) {
    const generated = t.id === state.view.sampled?.id;
    const picked = t.id === state.view.picked?.id;
    const focused = t.id === state.focus;
    const roles = `${generated ? ", generated" : ""}${picked ? ", picked by the same noise" : ""}`;
    const tip = `${quoted(t.text)}, id ${t.id}, rank ${t.rank}${roles}`;
    const onclick = () => store.set({ focus: focused ? null : t.id });
    return h("th.col", { scope: "col", class: focused && "focused" },
      h("button.head", { tip, "aria-pressed": String(focused), key: `token-${t.id}`, onclick },
        h("span.signs", { "aria-hidden": "true" }, generated && h("span.sign-a", "●"), picked && h("span.sign-b", "◆")),
        token(t.text)));
  }

  function cellOf(view, row, i) {
    const stage = view.stages[row];
    const [t, p] = [view.tokens[i], stage.p[i]];
    const kind = t.id === state.focus ? "focused" : "";
    if (stage.shape === "draw") return h("td.col", { class: kind }, t.id === view.picked?.id && h("span.winner", "picked"));
    if (p !== null) {
      return h("td.col", { class: kind, title: `${quoted(t.text)}: ${(100 * p).toPrecision(6)}%` }, bar(p), h("span.p", percent(p)));
    }
    if (removedAt(view, i) !== row) return h("td.col.gone", { class: kind });
    const title = `${quoted(t.text)} removed by ${stage.name}: ${stage.reasons[i] ?? stage.why}`;
    return h("td.col.removed", { class: kind, title }, bar(view.stages[row - 1].p[i], "ghost"),
      h("span.p", { "aria-hidden": "true" }, "✕"), h("span.hidden", "removed"));
  }

  function rowOf(view, row, columns) {
    const stage = view.stages[row];
    const [name, values] = titleOf(stage);
    const [draw, rest] = [stage.shape === "draw", restOf(stage, columns)];
    const number = (shown, text, title) => h("td.number", { title }, shown && text);
    return h("tr", { class: draw && "draw-row" },
      h("th.stage", { scope: "row" }, h("span.stage-name", name, values && h("span.values", values)),
        h("span.why", { title: stage.why }, row ? stage.why : "the model’s distribution"),
        !draw && h("span.brief", `${integer(stage.kept)} kept, ${fixed(stage.entropy, 2)} nats`)),
      number(true, integer(stage.kept), `${integer(stage.removed)} removed, ${integer(stage.changed)} changed`),
      number(!draw, fixed(stage.entropy), "entropy of the distribution after this stage, in nats"),
      number(row > 0 && !draw, percent(stage.removed_probability), "probability mass of the removed tokens"),
      number(row > 0 && !draw, fixed(stage.kl), "KL divergence from the row above, in nats"),
      columns.map((i) => cellOf(view, row, i)),
      h("td.number", { title: "all other surviving tokens together" }, !draw && percent(rest)));
  }

  function show() {
    const { view } = state;
    box.hidden = !view;
    if (!view) return;
    const fits = Math.floor(((region.clientWidth || 900) - FIXED) / COLUMN);
    const columns = columnsOf(view, count.value === "fit" ? Math.max(fits, 8) : 40, state.focus);
    most = mostOf(view, columns);
    const unit = (name, text) => h("th.number", { scope: "col" }, name, h("span.unit", text));
    keepFocus(box, () => {
      put(table,
        h("caption.hidden", `Step ${view.step}: the probabilities of the likeliest tokens after each stage`),
        h("thead", h("tr", h("th.stage", { scope: "col" }, "stage"),
          unit("kept", "tokens"), unit("entropy", "nats"), unit("removed", "mass"), unit("KL", "nats"),
          columns.map((i) => headOf(view.tokens[i])), unit("others", "mass"))),
        h("tbody", view.stages.map((_, row) => rowOf(view, row, columns))));
      showDetail();
    });
  }

  /** The token that is followed: its way down the stages, and what can be done with it. */
  function showDetail() {
    const { view } = state;
    const id = state.focus ?? view.picked?.id;
    const index = view.tokens.findIndex((t) => t.id === id);
    if (index < 0) return put(detail);
    const t = view.tokens[index];
    const { path, removal } = pathOf(view, index);
    const again = t.id === currentToken(state)?.id;
    return put(detail, token(t.text, "big"), h("span.muted", `id ${t.id} · rank ${integer(t.rank)}`),
      h("ol.path", { label: `Probability of ${quoted(t.text)} after each stage` },
        path.map(({ name, p }, i) => h("li", h("span.muted", `${i ? name : "model"} `), percent(p))),
        removal && h("li.removal", h("strong", `removed by ${removal.name}`), `: ${removal.reason}`)),
      button(again ? "Branch: go on from here again" : `Branch: go on with ${quoted(t.text)}`, () => session.branch(state.step, { token: t.id }), "small", {
        disabled: !api.live || state.generating,
        title: "Force this token at this step, and generate from there",
        key: "force",
      }));
  }

  store.on(["view", "focus"], show);
  store.on(["generating"], () => state.view && showDetail());
  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(region.clientWidth - width) < COLUMN / 2) return;
    width = region.clientWidth;
    show();
  }).observe(region);
  return box;
}
