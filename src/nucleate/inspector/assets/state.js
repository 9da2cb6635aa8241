// The state of one inspector, and who listens to which part of it.

/** A store: set() merges a patch and tells the listeners of the changed keys, once per microtask. */
export function createStore(initial) {
  const state = { ...initial };
  const listeners = [];
  let changed = new Set();

  function flush() {
    const keys = changed;
    changed = new Set();
    for (const { names, listener } of listeners) {
      if (names.some((name) => keys.has(name))) listener(state, keys);
    }
  }

  function touch(...names) {
    if (changed.size === 0) queueMicrotask(flush);
    for (const name of names) changed.add(name);
  }

  return {
    state,
    /** Tell the listeners that the contents of these keys changed. */
    touch,
    set(patch) {
      const names = Object.keys(patch).filter((name) => state[name] !== patch[name]);
      for (const name of names) state[name] = patch[name];
      if (names.length) touch(...names);
    },
    /** Call listener(state, changedKeys) when one of the keys changes. */
    on(names, listener) {
      listeners.push({ names, listener });
    },
    /** The same, at most once per frame: for what costs more and may come a little later. */
    onFrame(names, listener) {
      let waiting = false;
      const later = () => {
        if (!waiting) requestAnimationFrame(() => ((waiting = false), listener(state)));
        waiting = true;
      };
      listeners.push({ names, listener: later });
    },
  };
}

/** The state before anything is loaded. */
export function initialState() {
  return {
    settings: null, // what the server can do
    input: { prompt: "", messages: null }, // messages: a list in chat mode
    runs: new Map(), // id -> {id, parent, input, params, start, tokens, end, traces}
    run: null, // id of the run that is shown
    step: null, // step that is shown
    metric: "surprisal", // colour of the ribbon
    params: {}, // settings A; only what differs from the defaults
    paramsB: null, // settings B, if they are compared
    editing: "A",
    view: null, // the trace of the step under settings A
    viewB: null,
    focus: null, // id of the token that is followed down the ladder
    tab: "stages",
    generating: false,
    status: "", // for the live region
    problem: null, // {message, kind, param}
  };
}

/** The run that is shown. */
export function currentRun(state) {
  return state.run === null ? null : (state.runs.get(state.run) ?? null);
}

/** The token at the step that is shown. */
export function currentToken(state) {
  return currentRun(state)?.tokens[state.step] ?? null;
}
