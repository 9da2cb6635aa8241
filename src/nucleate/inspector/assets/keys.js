// Keys that work anywhere in the inspector, and the dialog that lists them.
import {button, h} from "./dom.js";

const LIST = {
  "← →": "previous, next step (in the ribbon, and where nothing else uses them)",
  "↑ ↓ PgUp PgDn": "in the ribbon: line by line, page by page",
  "Home End": "in the ribbon: first, last token",
  "Ctrl + Enter": "generate",
  Esc: "stop generating",
};
const OTHER_USES = "input, textarea, select, summary, dialog, [role=listbox], [role=tablist], [role=region]";

/** A listener to the keys inside root. */
export function keyListener(root, store, session) {
  return (event) => {
    const { key, target, defaultPrevented, ctrlKey, metaKey, altKey } = event;
    const { state } = store;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (defaultPrevented) return;
    if (key === "Enter" && (ctrlKey || metaKey)) root.querySelector("form")?.requestSubmit();
    else if (key === "Escape" && state.generating) session.stop();
    else if (by && state.step !== null && !ctrlKey && !metaKey && !altKey && !target.closest(OTHER_USES)) session.select(state.step + by);
    else return;
    event.preventDefault();
  };
}

/** The button that opens the dialog, and the dialog. list: what each key does. */
export function createKeysHelp(list = LIST) {
  const dialog = h("dialog.dialog", { label: "Keyboard" }, h("h2.title", "Keyboard"),
    h("dl.keys", Object.entries(list).map(([keys, what]) => h("div", h("dt", h("kbd", keys)), h("dd", what)))), button("Close", () => dialog.close()));
  return [button("Keys", () => dialog.showModal(), "quiet"), dialog];
}
