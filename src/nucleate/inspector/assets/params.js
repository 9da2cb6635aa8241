// Values of the sampling parameters, the active stages and their order. A params object holds only what differs.

/** Whether two JSON values are equal. */
export function same(a, b) {
  return JSON.stringify(a ?? null) === JSON.stringify(b ?? null);
}

/** Whether two params objects have the same effect on a step. */
export function sameParams(a, b) {
  const ignored = ["max_tokens", "stop"];
  const names = new Set([...Object.keys(a), ...Object.keys(b)].filter((name) => !ignored.includes(name)));
  return [...names].every((name) => same(a[name], b[name]));
}

/** Names of the parameters that several stages share, such as min_keep. */
export function sharedNames(settings) {
  const names = settings.stages.flatMap((stage) => stage.parameters.map((p) => p.name));
  return new Set(names.filter((name, i) => names.indexOf(name) !== i));
}

/** The value without a request: the model's recommendation or the default. */
export function baseValue(settings, name) {
  if (name in (settings.defaults ?? {})) return settings.defaults[name];
  if (name === "draw") return "gumbel";
  if (name === "order") return "canonical";
  return allParameters(settings).find((p) => p.name === name)?.default ?? null;
}

/** The parameters of all stages, and those of none. */
export function allParameters(settings) {
  return [...settings.stages.flatMap((stage) => stage.parameters), ...(settings.parameters ?? [])];
}

export function valueOf(settings, params, name) {
  return name in params ? params[name] : baseValue(settings, name);
}

/** The params with one value changed; a value equal to the default is left out. */
export function withValue(settings, params, name, value) {
  const made = { ...params };
  if (same(value, baseValue(settings, name))) delete made[name];
  else made[name] = value;
  return made;
}

/** The parameters that turn a stage on. */
function switches(stage) {
  const own = stage.parameters.filter((p) => p.neutral !== null);
  if (own.length) return own.map((p) => [p.name, p.neutral]);
  const optional = stage.parameters.filter((p) => p.optional && p.default === null);
  return (optional.length ? optional : stage.parameters).map((p) => [p.name, p.default]);
}

/** Whether a stage has an effect with these values. */
function isActive(settings, params, stage) {
  return switches(stage).some(([name, neutral]) => !same(valueOf(settings, params, name), neutral));
}

/** The params with a stage at its neutral values. */
export function withoutStage(settings, params, stage) {
  return switches(stage).reduce((made, [name, neutral]) => withValue(settings, made, name, neutral), params);
}

/** The order as a list of stage names. */
export function orderOf(settings, params) {
  const order = valueOf(settings, params, "order");
  return Array.isArray(order) ? order : (settings.orders[order] ?? settings.orders.canonical);
}

/** The stages that are active or pinned, in their order; combining stages come first. */
export function shownStages(settings, params, pinned) {
  const names = orderOf(settings, params);
  const place = (stage) => (stage.shape === "combine" ? -1 : (names.indexOf(stage.name) + 1 || 1000) - 1);
  const shown = settings.stages.filter((stage) => pinned.has(stage.name) || isActive(settings, params, stage));
  return shown.sort((a, b) => place(a) - place(b));
}

/** The params with stage `name` moved to the place of `target`; names: the movable stages in their order. */
export function withMoved(settings, params, names, name, target) {
  const [from, to] = [names.indexOf(name), names.indexOf(target)];
  if (from < 0 || to < 0 || from === to) return params;
  const made = [...names];
  made.splice(to, 0, made.splice(from, 1)[0]);
  const usual = settings.orders.canonical.filter((item) => made.includes(item));
  return withValue(settings, params, "order", same(usual, made) ? "canonical" : made);
}

/** The params with an order that includes every active stage: a preset that lacks one becomes a list. */
export function withCompleteOrder(settings, params) {
  const names = orderOf(settings, params);
  const { canonical } = settings.orders;
  const active = settings.stages.filter((stage) => stage.shape !== "combine" && isActive(settings, params, stage));
  const missing = active.map((stage) => stage.name).filter((name) => !names.includes(name));
  if (!missing.length) return params;
  const made = names.filter((name) => active.some((stage) => stage.name === name));
  for (const name of missing) {
    const next = made.findIndex((other) => canonical.indexOf(other) > canonical.indexOf(name));
    made.splice(next < 0 ? made.length : next, 0, name);
  }
  return { ...params, order: made };
}

/** The params as a request needs them: with the seed of a run, so that the noise is the same. */
export function complete(params, run) {
  return { ...params, seed: params.seed ?? run?.start?.seed ?? null };
}

/** A random seed that a JavaScript number holds exactly. */
export function randomSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}
