// What a person can do: load, generate, walk, change settings. Talks to the api and writes to the store.
import {currentRun} from "./state.js";
import {complete, randomSeed, sameParams, withCompleteOrder} from "./params.js";
import {endText, newTextMarks, takeToken} from "./text.js";

/** The tokens of a step that are requested. */
export const TOP_TOKENS = 40;

/** Ask for something again and again, with at most one request in flight: the latest request wins. */
function createFollower(ask, show, fail) {
  let flying = null;
  let next = null;
  async function start(body, place) {
    const abort = new AbortController();
    flying = { place, abort };
    try {
      const answer = await ask(body, abort.signal);
      if (!abort.signal.aborted) show(answer, body);
    } catch (error) {
      if (!abort.signal.aborted) fail(error);
    }
    if (flying?.abort !== abort) return;
    flying = null;
    if (next) {
      const [following, at] = next;
      next = null;
      start(following, at);
    }
  }
  return (body) => {
    const place = body && `${body.run} ${body.step}`;
    if (flying && flying.place === place) {
      next = [body, place];
      return;
    }
    flying?.abort.abort();
    flying = next = null;
    if (body) start(body, place);
  };
}

function newRun(start, given) {
  return { id: start.run, start, tokens: [], end: null, traces: {}, book: newTextMarks(), ...given };
}

/** The actions on a store. */
export function createSession(store, api) {
  const { state } = store;
  let abort = null;

  function fail(error) {
    if (error.name === "AbortError") return;
    const kinds = { 401: "key", 410: "stored", 404: "stored" };
    const kind = error.code === "step_not_stored" ? "stored" : (kinds[error.status] ?? (error.param ? "value" : "other"));
    store.set({ problem: { message: error.message, kind, param: error.param ?? null }, status: error.message });
  }

  function follower(slot) {
    return createFollower(
      (body, signal) => api.trace(body, signal),
      (view, body) => {
        const run = state.runs.get(body.run);
        if (run && !body.params) run.traces[body.step] = view;
        store.set({ [slot]: view, problem: null });
      },
      (error) => {
        if (error.code === "step_not_stored" || error.status === 404) store.set({ [slot]: null });
        fail(error);
      },
    );
  }
  const followA = follower("view");
  const followB = follower("viewB");

  /** Show the step under the settings, from what is there already if possible. */
  function refresh(slot, params, follow) {
    const run = currentRun(state);
    const t = run?.tokens[state.step];
    if (!t || t.origin === "forced" || !params) {
      follow(null);
      store.set({ [slot]: null });
      return;
    }
    const asked = complete(params, run);
    const unchanged = !api.live || sameParams(asked, run.params);
    if (unchanged && run.traces[state.step]) {
      follow(null);
      store.set({ [slot]: run.traces[state.step], problem: state.problem?.kind === "key" ? state.problem : null });
      return;
    }
    follow({ run: run.id, step: state.step, top: TOP_TOKENS, ...(unchanged ? {} : { params: asked }) });
  }

  store.on(["run", "step", "params", "first"], () => refresh("view", state.params, followA));
  store.on(["run", "step", "paramsB", "first"], () => refresh("viewB", state.paramsB, followB));

  function takeEvent(event, run, options) {
    if (event.type === "tokens") {
      for (const t of event.tokens) {
        run.tokens.push(t);
        takeToken(run.book, t);
        if (options.explore && !options.found && t.entropy > 1.5) {
          options.found = true; // a step with something to see
          if (state.run === run.id) store.set({ step: t.step });
        }
        if (t.step === state.step && state.run === run.id) store.touch("first");
      }
      store.touch("tokens");
    } else if (event.type === "end") {
      run.end = event;
      endText(run.book);
      store.touch("tokens");
      store.set({ status: `${run.tokens.length} tokens generated. Finish reason: ${event.finish_reason}.` });
    } else if (event.type === "error") {
      fail(Object.assign(new Error(event.error.message), event.error));
    }
  }

  /** Generate and show the run. request: {input, params, parent, keepView: do not show it}. Returns the run or null. */
  async function generate(request, options = {}) {
    abort?.abort();
    const signal = (abort = new AbortController()).signal;
    const params = withCompleteOrder(state.settings, { ...request.params, seed: request.params.seed ?? randomSeed() });
    const { parent = null, input } = request;
    const source = parent ? { parent } : input.messages ? { messages: input.messages } : { prompt: input.prompt };
    store.set({ generating: true, problem: null, status: "Generating …" });
    let run = null;
    const show = (event) => {
      if (event.type === "start") {
        run = newRun(event, { parent, input, params: { ...params, seed: params.seed ?? event.seed } });
        state.runs.set(run.id, run);
        store.touch("runs");
        if (!options.hidden) store.set({ run: run.id, step: options.step ?? 0 });
      } else if (run) takeEvent(event, run, options);
      else if (event.type === "error") fail(Object.assign(new Error(event.error.message), event.error));
    };
    try {
      await api.generate({ ...source, params }, show, signal);
    } catch (error) {
      fail(error);
    }
    if (run && !run.end) store.set({ status: "Generation stopped." });
    if (signal === abort?.signal) store.set({ generating: false });
    store.touch("runs", "tokens");
    return run;
  }

  return {
    fail,
    generate,
    stop: () => abort?.abort(),

    /** Continue at a step of the current run with another token or text. */
    branch(step, continuation) {
      const run = currentRun(state);
      const request = { input: run.input, parent: { run: run.id, step, ...continuation }, params: complete(state.params, run) };
      return generate(request, { step });
    },

    select(step) {
      const run = currentRun(state);
      if (run?.tokens.length) store.set({ step: Math.max(0, Math.min(run.tokens.length - 1, step)), focus: null });
    },

    showRun(id, step) {
      const run = state.runs.get(id);
      store.set({ run: id, step: Math.max(0, Math.min(step ?? state.step ?? 0, run.tokens.length - 1)), focus: null });
    },

    /** Add the runs of a saved document, and show the first one. */
    open(saved) {
      const first = { ...saved.run, traces: saved.traces ?? {} };
      for (const item of [first, ...(saved.branches ?? [])]) {
        const run = newRun(item.start, { parent: item.parent ?? null, input: item.input ?? first.input ?? null, params: item.start.params });
        run.traces = item.traces ?? {};
        for (const t of item.tokens) {
          run.tokens.push(t);
          takeToken(run.book, t);
        }
        run.end = item.end;
        if (run.end) endText(run.book);
        state.runs.set(run.id, run);
      }
      const step = Object.keys(first.traces).map(Number).find((n) => first.tokens[n]?.entropy > 1.5) ?? 0;
      store.set({ run: first.start.run, step, params: first.start.params, input: first.input ?? state.input });
      store.touch("runs", "tokens");
    },

    /** Change settings A or B, whichever is edited. */
    setParams(params) {
      store.set({ [state.editing === "B" ? "paramsB" : "params"]: withCompleteOrder(state.settings, params) });
    },
  };
}
