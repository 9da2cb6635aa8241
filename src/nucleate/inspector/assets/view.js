// Questions about the trace of a step: which tokens to show, where one was removed, how high a bar is.

/** The name of a stage and its arguments: "TopP(0.95)" of stage top_p is ["top_p", "0.95"]. */
export function titleOf({ name, shape, label }) {
  return [shape === "" ? "logits" : name, /\((.*)\)$/.exec(label)?.[1] ?? ""];
}

/** The index of the last stage before the draw: its distribution is the one that is sampled from. */
export function lastStage(view) {
  return Math.max(0, view.stages.length - (view.stages.at(-1).shape === "draw" ? 2 : 1));
}

/** The index of the stage that removed a token before the draw, or -1. */
export function removedAt(view, index) {
  const at = view.stages.findIndex((stage) => stage.p[index] === null);
  return at <= lastStage(view) ? at : -1;
}

/** The indices of at most `count` tokens: the likeliest by the model, and always those that were sampled or picked. */
export function columnsOf(view, count, focus) {
  const wanted = [view.sampled?.id, view.picked?.id, focus];
  const must = view.tokens.map((t, i) => (wanted.includes(t.id) ? i : -1)).filter((i) => i >= 0);
  const rest = view.tokens.map((_, i) => i).filter((i) => !must.includes(i));
  const rank = (i) => view.tokens[i].rank;
  return [...must, ...rest.slice(0, Math.max(0, count - must.length))].sort((a, b) => rank(a) - rank(b));
}

/** The probability of the surviving tokens of a stage that are not among the columns. */
export function restOf(stage, columns) {
  const rest = stage.p.reduce((sum, p, i) => sum + (columns.includes(i) ? 0 : p), 0) + stage.rest;
  return rest < 1e-9 ? 0 : rest;
}

/** The highest probability among the columns. */
export function mostOf(view, columns) {
  const stages = view.stages.slice(0, lastStage(view) + 1);
  return Math.max(1e-9, ...stages.flatMap((stage) => columns.map((i) => stage.p[i] ?? 0)));
}

/** What happened to a token: [{name, p}] of the stages it survived, and the removal, if any. */
export function pathOf(view, index) {
  const at = removedAt(view, index);
  const stages = view.stages.slice(0, at < 0 ? lastStage(view) + 1 : at);
  const { name, reasons, why } = view.stages[at] ?? {};
  return { path: stages.map((stage) => ({ name: stage.name, p: stage.p[index] })), removal: at < 0 ? null : { name, reason: reasons[index] ?? why } };
}

/** The height of a bar, 0 to 1: linear, or logarithmic from 1e-6 to 1. */
export function barHeight(p, scale, most) {
  if (!p) return 0;
  return scale === "log" ? Math.max(0.02, 1 + Math.log10(p) / 6) : Math.max(0.015, p / most);
}
