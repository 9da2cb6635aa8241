// The menu to save and share: the trace as JSON or as a page, the step as CSV or picture, code, and a link.
import {toJson} from "./api.js";
import {csvOf, curlOf, pythonOf, toHash} from "./code.js";
import {button, h, put} from "./dom.js";
import {ladderPicture, pngOf, svgText} from "./picture.js";
import {complete, sameParams} from "./params.js";
import {documentOf} from "./saved.js";
import {currentRun} from "./state.js";

const HOLDER = /(<script[^>]*id="nci-document"[^>]*>)null(<\/script>)/;

function download(name, content) {
  const href = URL.createObjectURL(new Blob([content]));
  h("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10000);
}

/** open: lets a person choose a file; shareable: whether the page has an address with a server behind it. */
export function createExport(store, session, api, { open, shareable }) {
  const { state } = store;
  const report = (status) => store.set({ status });
  const name = (ending) => `nucleate-step-${state.step}.${ending}`;
  const picture = () => ladderPicture(state.view, `${state.settings.model.name}: step ${state.view.step}`);
  const data = async () => toJson(await documentOf(state, api, report));

  const [title, remark] = [h("h2.title"), h("span.help", { role: "status" })];
  const code = h("pre.code", { tabindex: 0, role: "region", label: "Code" });
  const dialog = h("dialog.dialog", { label: "Code" }, title, code, h("div.tools",
    button("Copy", async () => (remark.textContent = await copy(code.textContent, "Copied.")), "primary"), button("Close", () => dialog.close()), remark));

  async function copy(text, done) {
    try {
      await navigator.clipboard.writeText(text);
      return done;
    } catch {
      return "The browser did not allow copying. Select the text and copy it.";
    }
  }

  function showCode(heading, text) {
    const run = currentRun(state);
    title.textContent = heading;
    code.textContent = text;
    remark.textContent = sameParams(complete(state.params, run), run.params) ? "" : "For the output as it was generated, without later changes of the settings.";
    dialog.showModal();
  }

  async function savePage() {
    const page = await api.template();
    const text = (await data()).replaceAll("<", "\\u003c");
    download(name("html"), page.replace(HOLDER, (_, before, after) => before + text + after));
  }

  async function shareLink() {
    const run = currentRun(state);
    history.replaceState(null, "", toHash(run.input, complete(state.params, run)));
    report(await copy(location.href, "The link is in the clipboard."));
  }

  function actions() {
    const run = currentRun(state);
    const model = state.settings.model.name;
    return [
      run && ["Trace as JSON", "The output with its stages; this page opens it again", async () => download(name("json"), await data())],
      run && api.template && ["Trace as a page", "One HTML file that needs no server", savePage],
      state.view && ["This step as CSV", "Tokens with their probability after each stage", () => download(name("csv"), csvOf(state.view))],
      state.view && ["Stages as SVG", "A picture for slides and papers", () => download(name("svg"), svgText(picture()))],
      state.view && ["Stages as PNG", "The same, as pixels", async () => download(name("png"), await pngOf(picture()))],
      run && ["Python", "Code that gives this output again", () => showCode("Python", pythonOf(run, model))],
      run && shareable && ["curl", "A request that gives this output again", () => showCode("curl", curlOf(run, model, new URL(".", document.baseURI).href.replace(/\/$/, ""), state.settings.needs_key))],
      run?.input && shareable && ["Copy a link", "Prompt and settings, in the address", shareLink],
      ["Open a saved trace …", "Or drop the file on the page", open],
    ].filter(Boolean);
  }

  const list = h("div.menu-list");
  const summary = h("summary.button", { key: "save" }, "Save and share");
  const menu = h("details.menu", {
    ontoggle: () => put(list, menu.open && actions().map(([text, help, act]) => h("button.menu-item", { onclick: () => run(act) }, text, h("span.help", help)))),
    onkeydown(event) {
      if (event.key === "Escape" && menu.open) close();
    },
    onfocusout: (event) => event.relatedTarget && !menu.contains(event.relatedTarget) && (menu.open = false),
  }, summary, list);

  function close() {
    menu.open = false;
    summary.focus();
  }

  async function run(act) {
    close();
    try {
      await act();
      if (state.status.startsWith("Collecting")) report("Saved.");
    } catch (error) {
      session.fail(error);
    }
  }
  return h("div", menu, dialog);
}
