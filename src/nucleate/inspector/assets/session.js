// What a person can do: generate, walk, change settings. Talks to the api and writes to the store.
import {clamp} from "./dom.js";
import {complete, randomSeed, sameParams, withCompleteOrder} from "./params.js";
import {currentRun, sourceOf} from "./state.js";
import {endText, newTextMarks, takeToken} from "./text.js";

/** The tokens of a step that are requested. */
export const TOP_TOKENS = 40;

const INTERESTING = 1.5; // entropy, in nats, of the step that is shown first
const STATISTICS = ["probability", "model_probability", "surprisal", "entropy", "rank", "kept"];

/** Ask again and again, with at most one request in flight, and the latest next; another place aborts it. */
function createFollower(ask) {
  let flying = null;
  let next = null;
  async function start(place, body, show, fail) {
    const abort = new AbortController();
    const mine = (flying = { place, abort });
    try {
      const answer = await ask(body, abort.signal);
      if (!abort.signal.aborted) show(answer);
    } catch (error) {
      if (!abort.signal.aborted) fail(error);
    }
    if (flying !== mine) return;
    flying = null;
    if (next) start(...next);
    next = null;
  }
  return (...request) => {
    if (flying && flying.place === request[0]) {
      next = request;
      return;
    }
    flying?.abort.abort();
    flying = next = null;
    if (request[0]) start(...request);
  };
}

/** The actions on a store. */
export function createSession(store, api) {
  const { state } = store;
  let abort = null;

  function fail(error) {
    if (error.name === "AbortError") return;
    const { message, code, param = null, status } = error;
    const kind = status === 401 ? "key" : code === "step_not_stored" || status === 404 ? "stored" : "other";
    store.set({ problem: { message, kind, param }, status: message });
  }

  function addRun(start, more) {
    const run = { id: start.run, start, tokens: [], end: null, traces: {}, book: newTextMarks(), ...more };
    state.runs.set(run.id, run);
    store.touch("runs");
    return run;
  }

  /** Add a token; a given one has the statistics of the same token of the run it comes from. */
  function addToken(run, t) {
    const before = state.runs.get(run.parent?.run)?.tokens[t.step];
    if (t.surprisal === null && before?.id === t.id) for (const name of STATISTICS) t[name] = before[name];
    run.tokens.push(t);
    takeToken(run.book, t);
  }

  /** Show the step under settings in a slot of the state, from what is there already if possible. */
  function refresher(slot, settings) {
    const follow = createFollower((body, signal) => api.trace(body, signal));
    return () => {
      const { step, [settings]: params } = state;
      const run = currentRun(state);
      const source = run && sourceOf(state.runs, run, step);
      if (!source || !params) {
        follow(null);
        store.set({ [slot]: null });
        return;
      }
      const wanted = complete(params, run);
      const unchanged = !api.live || sameParams(wanted, run.params);
      const show = (view) => {
        const { id, text } = run.tokens[step];
        const seen = { ...view, sampled: { id, text } };
        if (unchanged) run.traces[step] = seen;
        store.set({ [slot]: seen, problem: null });
      };
      if (unchanged && run.traces[step]) {
        follow(null);
        show(run.traces[step]);
        return;
      }
      const body = { run: source.id, step, top: TOP_TOKENS, include: [run.tokens[step].id] };
      if (!unchanged || source !== run) body.params = wanted;
      follow(`${run.id} ${step}`, body, show, (error) => {
        if (!error.param) store.set({ [slot]: null });
        fail(error);
      });
    };
  }
  store.on(["run", "step", "params", "first"], refresher("view", "params"));
  store.on(["run", "step", "paramsB", "first"], refresher("viewB", "paramsB"));

  function takeEvent(run, event, options) {
    if (event.type === "end") {
      run.end = event;
      endText(run.book);
      store.set({ status: `${run.tokens.length} tokens generated. Finish reason: ${event.finish_reason}.` });
    } else {
      for (const t of event.tokens) {
        addToken(run, t);
        if (options.explore && t.entropy > INTERESTING) {
          options.explore = false;
          store.set({ step: t.step });
        }
        if (t.step === state.step) store.touch("first");
      }
    }
    store.touch("tokens");
  }

  /** Generate and show a run. request: {input, params, parent}; options: step, explore, hidden. Returns the run or null. */
  async function generate({ input, parent = null, params: given }, options = {}) {
    abort?.abort();
    const mine = (abort = new AbortController());
    const params = withCompleteOrder(state.settings, { ...given, seed: given.seed ?? randomSeed() });
    const source = parent ? { parent } : input.messages ? { messages: input.messages } : { prompt: input.prompt };
    let run = null;
    store.set({ generating: true, problem: null, status: "Generating …" });
    try {
      await api.generate({ ...source, params }, (event) => {
        if (event.type === "error") throw Object.assign(new Error(), event.error);
        if (event.type !== "start") return takeEvent(run, event, options);
        run = addRun(event, { parent, input, params });
        return options.hidden || store.set({ run: run.id, step: options.step ?? 0 });
      }, mine.signal);
    } catch (error) {
      fail(error);
    }
    if (run && !run.end) store.set({ status: "Generation stopped." });
    if (run && !options.hidden && state.step >= run.tokens.length) select(run.tokens.length - 1);
    if (mine === abort) store.set({ generating: false });
    store.touch("runs", "tokens");
    return run;
  }

  function select(step) {
    const run = currentRun(state);
    if (run?.tokens.length) store.set({ step: clamp(step, 0, run.tokens.length - 1), focus: null });
  }

  return {
    fail,
    generate,
    select,
    stop: () => abort?.abort(),

    /** Continue at a step of the run with another token or text. */
    branch(step, continuation) {
      const run = currentRun(state);
      return generate({ input: run.input, parent: { run: run.id, step, ...continuation }, params: complete(state.params, run) }, { step });
    },

    showRun(id, step = state.step) {
      store.set({ run: id });
      select(step);
    },

    /** Add the runs of a saved document, and show the one with the most traces. */
    open({ run: first, traces = {}, branches = [] }) {
      const input = first.input ?? null;
      for (const { start, tokens, end, parent = null, ...item } of [{ ...first, traces }, ...branches]) {
        const run = addRun(start, { end, parent, input, params: start.params, traces: item.traces ?? {} });
        for (const t of tokens) addToken(run, t);
        if (end) endText(run.book);
      }
      const count = (run) => Object.keys(run.traces).length;
      const shown = [...state.runs.values()].reduce((best, run) => (count(run) > count(best) ? run : best));
      const step = Object.keys(shown.traces).map(Number).find((n) => shown.tokens[n]?.entropy > INTERESTING) ?? 0;
      store.set({ run: shown.id, step, params: shown.params, input: input ?? state.input });
      store.touch("tokens");
    },

    /** Change settings A or B, whichever is edited. */
    setParams(params) {
      store.set({ [state.editing === "B" ? "paramsB" : "params"]: withCompleteOrder(state.settings, params) });
    },
  };
}
