// Tabs with the keys and roles of the ARIA pattern.
import {h, uid} from "./dom.js";

/** panels: [name, label, ...content]. The chosen name is the key `tab` of the store. */
export function createTabs(store, panels) {
  const made = panels.map(([name, label, ...content]) => {
    const [id, panelId] = [uid(), uid()];
    const tab = h("button.tab", { role: "tab", id, "aria-controls": panelId, onclick: () => store.set({ tab: name }) }, label);
    return { name, tab, panel: h("div.panel", { role: "tabpanel", id: panelId, "aria-labelledby": id }, content) };
  });
  function onkeydown(event) {
    const at = made.findIndex(({ name }) => name === store.state.tab);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: -1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const { name, tab } = made.at(to % made.length);
    store.set({ tab: name });
    tab.focus();
  }
  function show({ tab: chosen }) {
    for (const { name, tab, panel } of made) {
      tab.setAttribute("aria-selected", String(name === chosen));
      tab.tabIndex = name === chosen ? 0 : -1;
      panel.hidden = name !== chosen;
    }
  }
  store.on(["tab"], show);
  show(store.state);
  return [h("div.tabs", { role: "tablist", label: "Views of the step", onkeydown }, made.map(({ tab }) => tab)), made.map(({ panel }) => panel)];
}
