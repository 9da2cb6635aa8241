// The saved document: everything about a run and its branches that a page without a server can show.
import {TOP_TOKENS} from "./session.js";
import {currentRun} from "./state.js";

const MAX_TRACES = 256; // steps of a run that are saved with their stages

/** Fetch the traces of a run that are not there yet, those around the chosen step first. */
async function complement(run, api, near, report) {
  const missing = run.tokens.filter((t) => !run.traces[t.step] && t.origin !== "forced").map((t) => t.step);
  missing.sort((a, b) => Math.abs(a - near) - Math.abs(b - near));
  const wanted = api.live ? missing.slice(0, Math.max(0, MAX_TRACES - Object.keys(run.traces).length)) : [];
  for (const [i, step] of wanted.entries()) {
    report(`Collecting the stages: ${i + 1} of ${wanted.length} steps`);
    try {
      run.traces[step] = await api.trace({ run: run.id, step, top: TOP_TOKENS });
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
  await complement(run, api, state.step ?? 0, report);
  const [root, ...branches] = familyOf(state.runs, run);
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
