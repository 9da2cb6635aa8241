// Icons as SVG, 16 by 16, in the colour of the text.
import {h, svg} from "./dom.js";

const PATHS = {
  add: "M8 3v10M3 8h10",
  again: "M13 8a5 5 0 1 1-1.6-3.7M13.2 2v3h-3",
  back: "M10 3.5 5.5 8l4.5 4.5",
  close: "M4 4l8 8M12 4l-8 8",
  colours: "M8 2.2c2.6 3 4.2 5.1 4.2 7.1a4.2 4.2 0 0 1-8.4 0c0-2 1.6-4.1 4.2-7.1z",
  copy: "M6 6V3.5a1 1 0 0 1 1-1h5.5a1 1 0 0 1 1 1V9a1 1 0 0 1-1 1H10M3.5 6H9a1 1 0 0 1 1 1v5.5a1 1 0 0 1-1 1H3.5a1 1 0 0 1-1-1V7a1 1 0 0 1 1-1z",
  edit: "M10.8 2.7 13.3 5.2 5.5 13l-3 .5.5-3z",
  go: "M4.5 3.2v9.6L12 8z",
  menu: "M2.5 4.5h11M2.5 8h11M2.5 11.5h11",
  more: "M3.5 8h.01M8 8h.01M12.5 8h.01",
  next: "M6 3.5 10.5 8 6 12.5",
  remove: "M3 4.5h10M6.5 4.5V3h3v1.5M4.5 4.5l.5 8.5h6l.5-8.5",
  send: "M8 13V3.5M3.8 7.5 8 3.3l4.2 4.2",
  settings: "M2.5 5h6M12 5h1.5M10.2 3.3v3.4M2.5 11H4M7.5 11h6M5.8 9.3v3.4",
  stop: "M4.5 4.5h7v7h-7z",
  theme: "M8 2.5a5.5 5.5 0 1 0 0 11zM8 2.5a5.5 5.5 0 0 1 0 11",
};

export function icon(name) {
  return svg("svg", { class: `icon-picture ${["stop", "go"].includes(name) ? "filled" : ""}`, viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true" }, svg("path", { d: PATHS[name] }));
}

/** A button that is an icon. tip: what it does. */
export function iconButton(name, tip, onclick, props = {}) {
  return h("button.tool", { onclick, tip, key: tip, ...props }, icon(name));
}
