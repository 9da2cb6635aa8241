// The inspector: builds all parts inside one element.
import {checkDocument, FileApi, parseJson} from "./api.js";
import {createCompare} from "./compare.js";
import {createControls} from "./controls.js";
import {button, h, integer, put} from "./dom.js";
import {createDraws} from "./draws.js";
import {createExport} from "./export.js";
import {createKeysHelp, keyListener} from "./keys.js";
import {createLadder} from "./ladder.js";
import {createLegend, createRibbonHead} from "./legend.js";
import {createProblem} from "./problem.js";
import {createPrompt} from "./prompt.js";
import {createRace} from "./race.js";
import {createRibbon} from "./ribbon.js";
import {createSession} from "./session.js";
import {createStore, initialState} from "./state.js";
import {createStepHeading} from "./step.js";
import {createTabs} from "./tabs.js";
import {createTree} from "./tree.js";

const FIRST_PARAMS = { temperature: 0.9, top_p: 0.95, max_tokens: 60 };

/** Change between the light and the dark theme; the first one is that of the system. */
function changeTheme(root) {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}

/**
 * Build an inspector inside root.
 *
 * api: HttpApi, FileApi, or another object with the same methods. options: document (a saved trace to show), prompt,
 * messages, params, step (the one to show first), shareable (whether the page has an address with a server behind it).
 */
export async function mount(root, api, options = {}) {
  const store = createStore(initialState());
  const { state } = store;
  const session = createSession(store, api);
  const problem = createProblem(store, session, api, start);
  const status = h("p.status", { role: "status" });
  store.on(["status"], () => (status.textContent = state.status));
  const picker = h("input", {
    type: "file", accept: ".json", hidden: true, label: "Saved trace", onchange: () => picker.files.length && openFile(picker.files[0]),
  });
  const open = () => picker.click();
  root.classList.add("nci");

  async function openFile(file) {
    try {
      const saved = checkDocument(parseJson(await file.text()));
      session.stop();
      mount(root, new FileApi(saved), { document: saved, shareable: false });
    } catch (error) {
      session.fail(error instanceof SyntaxError ? new Error("This file is not JSON.") : error);
    }
  }

  function frame(...content) {
    put(root, content.slice(0, -1), h("main.main", content.at(-1)), picker);
  }

  function build() {
    const { model } = state.settings;
    const close = button("×", () => hint.remove(), "icon", { tip: "Close the hint" });
    const hint = h("p.note", "Click a token, or walk with ← and →, to see what every sampling stage did to it. Move a slider: the stages follow at once, on the same noise.", close);
    frame(
      h("header.header", h("h1.brand", "nucleate ", h("span.muted", "inspector")),
        h("p.model", `${model.name} `, h("span.muted", `${integer(model.vocab_size)} tokens`)), status,
        h("div.header-buttons", options.shareable && api.live && h("a.button.quiet.page-link", { href: "." }, "Chat"), createExport(store, session, api, { open, shareable: options.shareable && api.live }), createKeysHelp(), button("Theme", () => changeTheme(root), "quiet", { title: "Light or dark" }))),
      [api.live ? hint : h("p.note", "A saved trace: what needs a model is switched off."),
        h("section.card.output", { label: "Output" }, createPrompt(store, session, api), createRibbonHead(store), createRibbon(store, session), createLegend(store)),
        h("div.columns-main",
          h("section.card.step-card", { label: "The chosen step" }, problem, createStepHeading(store, session), createTabs(store, [
            ["stages", "Stages", createLadder(store, session, api), createRace(store)],
            ["draws", "Many draws", createDraws(store, session, api)],
            ["compare", "Compare A/B", createCompare(store, session, api)],
            ["branches", "Branches", createTree(store, session, api)],
          ])),
          createControls(store, session, api))]);
  }

  async function start() {
    try {
      const settings = await api.settings();
      const input = { prompt: options.prompt ?? settings.example, messages: options.messages ?? null };
      store.set({ settings, input, params: { ...(options.params ?? FIRST_PARAMS) } });
    } catch (error) {
      loading.remove();
      session.fail(error);
      return;
    }
    build();
    if (options.document?.run) session.open(options.document);
    else session.generate({ input: state.input, params: state.params }, options.step === null || options.step === undefined ? { explore: true } : { step: options.step });
  }

  const isFile = (event) => event.dataTransfer?.types.includes("Files");
  root.ondragover = (event) => isFile(event) && event.preventDefault();
  root.ondrop = (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    openFile(event.dataTransfer.files[0]);
  };
  (root.id === "nci-root" ? document.body : root).onkeydown = keyListener(root, store, session);
  const loading = h("p.help", "Loading …");
  frame([h("h1.brand", "nucleate inspector"), problem, api.saved === null ? [h("p", "No trace is open."), h("p", button("Open a saved trace …", open, "primary"))] : loading]);
  if (api.saved !== null) await start();
}
