// Element helpers and number formats. All text is set as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";
const SPECIAL = { label: "aria-label", key: "data-key" };
let counter = 0;

/** A unique id, so that several inspectors can live in one document. */
export function uid() {
  counter += 1;
  return `nci-${counter}`;
}

/** "a b" as "nci-a nci-b". */
export function classes(names) {
  return names.split(" ").filter(Boolean).map((name) => `nci-${name}`).join(" ");
}

/**
 * Create an element: h("p.help.big", {title: "..."}, ...children).
 *
 * Classes get the prefix nci-. Properties may be left out; false and null leave one out. onclick and the like are
 * listeners, css holds style properties, tip is both the title and the label.
 */
export function h(name, ...rest) {
  return make(document.createElement.bind(document), name, rest);
}

/** The same for SVG. */
export function svg(name, ...rest) {
  return make((tag) => document.createElementNS(SVG, tag), name, rest);
}

function make(create, name, rest) {
  const [tag, ...names] = name.split(".");
  const element = create(tag);
  const props = rest[0]?.constructor === Object ? rest.shift() : {};
  const { class: more = "", css = {}, tip, ...others } = props;
  const list = classes(`${names.join(" ")} ${more || ""}`);
  if (list) element.setAttribute("class", list);
  if (tag === "button" && !others.type) element.type = "button";
  for (const [key, value] of Object.entries(css)) element.style.setProperty(key, value);
  if (tip) Object.assign(others, { title: tip, label: tip });
  for (const [key, value] of Object.entries(others)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (["value", "checked", "disabled"].includes(key)) element[key] = value;
    else element.setAttribute(SPECIAL[key] ?? key, value === true ? "" : value);
  }
  return put(element, rest);
}

/** Replace the children of an element. null and false are left out. */
export function put(element, ...children) {
  const present = (child) => child !== null && child !== undefined && child !== false;
  element.replaceChildren(...children.flat(Infinity).filter(present));
  return element;
}

/** A button. kind: its classes. */
export function button(text, onclick, kind = "", props = {}) {
  return h("button", { class: /icon|segment/.test(kind) ? kind : `button ${kind}`, onclick, key: text, ...props }, text);
}

/** A select with its label: [the element, the select]. options: names, or [value, text]. */
export function choice(label, options, change, props = {}) {
  const id = uid();
  const list = options.map((option) => [option].flat()).map(([value, text = value]) => h("option", { value }, text));
  const input = h("select.select", { id, key: label, onchange: () => change(input.value), ...props }, list);
  return [h("div.inline", h("label.label", { for: id }, label), input), input];
}

/** A region that scrolls sideways, also with the keyboard. */
export function scroller(label, ...children) {
  return h("div.scroll", { tabindex: 0, role: "region", label }, children);
}

/** A table. heads: "#x" is a column of numbers, "~x" one of pictures. rows: lists of cells; row.won marks one. */
export function grid(label, heads, rows) {
  const kinds = heads.map((head) => ({ "#": "number", "~": "picture" })[head[0]] ?? "");
  const titles = heads.map((head, i) => h("th", { scope: "col", class: kinds[i] }, kinds[i] ? head.slice(1) : head));
  const line = (row) => h("tr", { class: row.won ? "winner-row" : "" }, row.map((cell, i) =>
    h(i ? "td" : "th", { class: kinds[i], scope: i ? null : "row" }, cell)));
  return scroller(label, h("table.table", h("thead", h("tr", titles)), h("tbody", rows.map(line))));
}

/** Build content again, and keep the focus on the element with the same key. */
export function keepFocus(root, build) {
  const key = root.contains(document.activeElement) && document.activeElement.getAttribute("data-key");
  build();
  if (key) [...root.querySelectorAll("[data-key]")].find((item) => item.getAttribute("data-key") === key)?.focus();
}

/** A probability as a percentage with three significant digits. */
export function percent(p) {
  if (p === null || p === undefined) return "–";
  const value = 100 * p;
  if (value >= 99.95) return p === 1 ? "100%" : ">99.9%";
  if (value && value < 0.001) return `${value.toExponential(0)}%`;
  return value ? `${value.toFixed(value >= 10 ? 1 : value >= 1 ? 2 : 3)}%` : "0%";
}

/** A number with a fixed number of decimals and a typographic minus sign. */
export function fixed(x, decimals = 3) {
  if (x === null || x === undefined) return "–";
  return (Math.abs(x) < 0.5 * 10 ** -decimals ? 0 : x).toFixed(decimals).replace("-", "−");
}

export function signed(x, decimals = 3) {
  return fixed(x, decimals).replace(/^(?!−)/, "+");
}

export function integer(n) {
  return n?.toLocaleString("en-US") ?? "–";
}

export function plural(n, noun) {
  return `${integer(n)} ${noun}${n === 1 ? "" : "s"}`;
}

/** The text of a token with visible white space. */
export function visible(text) {
  const signs = { " ": "·", "\n": "↵", "\t": "→" };
  return text === "" ? "∅" : text.replace(/[\u0000-\u0020\u007f-\u009f]/g, (c) => signs[c] ?? "�");
}

/** The text of a token in quotes, for labels and sentences. */
export function quoted(text) {
  return text === "" ? "the empty text" : `“${text.replace(/\n/g, "↵").replace(/\t/g, "→")}”`;
}

/** A token in monospace. */
export function token(text, kind = "") {
  return h("span.token", { class: kind }, visible(text));
}

export function clamp(x, low, high) {
  return Math.min(high, Math.max(low, x));
}
