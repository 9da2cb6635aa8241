// The state of one inspector, and who listens to which part of it.

/** The state before anything is loaded. */
export function initialState() {
  return {
    settings: null, // what the server can do
    input: { prompt: "", messages: null }, // messages: a list in chat mode
    runs: new Map(), // id -> {id, parent, input, params, start, tokens, end, traces, book}
    run: null, // id of the run that is shown
    step: null, // step that is shown
    metric: "surprisal", // colour of the ribbon
    params: {}, // settings A; only what differs from the defaults
    paramsB: null, // settings B, if they are compared
    editing: "A",
    view: null, // the trace of the step under settings A
    viewB: null,
    focus: null, // id of the token that is followed down the stages
    tab: "stages",
    generating: false,
    status: "", // for the live region
    problem: null, // {message, kind, param}
  };
}

/** A store. Listeners are called once per microtask with the state and the changed keys. */
export function createStore(state) {
  const listeners = [];
  let changed = new Set();

  function flush() {
    const keys = changed;
    changed = new Set();
    for (const [names, listener] of listeners) if (names.some((name) => keys.has(name))) listener(state, keys);
  }

  /** Tell the listeners that the contents of these keys changed. */
  function touch(...names) {
    if (changed.size === 0) queueMicrotask(flush);
    for (const name of names) changed.add(name);
  }

  return {
    state,
    touch,
    set(patch) {
      const names = Object.keys(patch).filter((name) => state[name] !== patch[name]);
      Object.assign(state, patch);
      if (names.length) touch(...names);
    },
    on(names, listener) {
      listeners.push([names, listener]);
    },
    /** The same, at most once per frame: for what costs more and may come a little later. */
    onFrame(names, listener) {
      let waiting = false;
      listeners.push([names, () => {
        if (!waiting) requestAnimationFrame(() => ((waiting = false), listener(state)));
        waiting = true;
      }]);
    },
  };
}

/** The run that is shown. */
export function currentRun(state) {
  return state.runs.get(state.run) ?? null;
}

/** The token at the step that is shown. */
export function currentToken(state) {
  return currentRun(state)?.tokens[state.step] ?? null;
}

/** The run whose logits a step has: an earlier one for the given tokens of a branch; null if there are none. */
export function sourceOf(runs, run, step) {
  const origin = run.tokens[step]?.origin;
  if (origin !== "given") return origin && origin !== "forced" ? run : null;
  const before = runs.get(run.parent?.run);
  return before && step <= run.parent.step ? sourceOf(runs, before, step) : null;
}
