// The saved document: everything about a run and its branches that a page without a server can show.
import {TOP_TOKENS} from "./session.js";
import {currentRun, sourceOf} from "./state.js";

const MAX_TRACES = 256; // steps whose stages are fetched to be saved

/** Fetch the traces of some runs that are not there yet, those around the chosen step first. */
async function complement(runs, family, api, near, report) {
  const missing = family.flatMap((run) => run.tokens.filter((t) => !run.traces[t.step] && sourceOf(runs, run, t.step))
    .map(({ step, id }) => ({ run, step, id })).sort((a, b) => Math.abs(a.step - near) - Math.abs(b.step - near)));
  const wanted = api.live ? missing.slice(0, MAX_TRACES) : [];
  for (const [i, { run, step, id }] of wanted.entries()) {
    report(`Collecting the stages: ${i + 1} of ${wanted.length} steps`);
    try {
      const body = { run: sourceOf(runs, run, step).id, step, params: run.params, top: TOP_TOKENS, include: [id] };
      run.traces[step] = { ...await api.trace(body), sampled: { id, text: run.tokens[step].text } };
    } catch (error) {
      if (error.code !== "step_not_stored") throw error; // that step stays without its stages
    }
  }
}

/** The first run of a family, and all runs that come from it. */
function familyOf(runs, run) {
  let root = run;
  while (runs.has(root.parent?.run)) root = runs.get(root.parent.run);
  const found = [root];
  for (const item of found) found.push(...[...runs.values()].filter((other) => other.parent?.run === item.id));
  return found;
}

/** The document of the run that is shown. report(text) is called with the progress. */
export async function documentOf(state, api, report) {
  const run = currentRun(state);
  const family = familyOf(state.runs, run);
  const [root, ...branches] = family;
  await complement(state.runs, [run, ...family.filter((other) => other !== run)], api, state.step ?? 0, report);
  const { settings } = state;
  const plain = ({ start, tokens, end }) => ({ start, tokens, end });
  return {
    format: "nucleate-trace",
    version: 1,
    created: new Date().toISOString(),
    nucleate: settings.nucleate ?? "",
    settings,
    run: { ...plain(root), input: root.input },
    traces: root.traces,
    branches: branches.map((item) => ({ parent: item.parent, ...plain(item), traces: item.traces })),
  };
}
