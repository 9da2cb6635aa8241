// Markdown as elements. Text is set as text, never as HTML; a picture becomes a link, and nothing is loaded.
//
// Every piece of text knows its place in the source, so that the page can show which token wrote it: leaf(start, end)
// returns what to show for a part of the source. A line is such a part without its indentation and marks.
import {button, h, scroller} from "./dom.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const DIVIDER = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const LINK = /^(!?)\[((?:[^[\]\\]|\\.|\[[^[\]]*\])*)\]\(\s*<?((?:[^\s<>()]|\([^\s()]*\))*)>?(?:\s+["'(][^"')]*["')])?\s*\)/;
const URL_TEXT = /^https?:\/\/[^\s<>]*[^\s<>.,;:!?'")\]*_~]/;
const ESCAPE = /^\\[!-'*-/:-@^-`{-~]/; // not \( and \[, which begin formulas
const MARKS = [["***", "em", "strong"], ["___", "em", "strong"], ["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const DEEPEST = 12; // levels of lists, quotes and emphasis; what is deeper is plain text

const KEYWORDS = new Set(("and as assert async await break case catch class const continue def default del delete do elif else enum except export extends " +
  "extern false False final finally fn for foreach from func function global if impl implements import in instanceof interface is lambda let match mod mut " +
  "namespace new nil None nonlocal not null or pass private protected pub public raise return self static struct super switch this throw trait true True try " +
  "type typedef typeof undefined union use using var void where while with yield select insert update create table values join group order by limit " +
  "then fi done esac echo").split(" "));
const HASH_COMMENTS = /^(py|python|sh|bash|shell|zsh|console|yaml|yml|toml|rb|ruby|r|perl|make|makefile|dockerfile|ini)$/i;
const CODE = (comment) => new RegExp(`(${comment})|("(?:[^"\\\\\\n]|\\\\.)*"|'(?:[^'\\\\\\n]|\\\\.)*'|\`(?:[^\`\\\\]|\\\\.)*\`)|(\\b\\d[\\w.]*)|([A-Za-z_$][\\w$]*)`, "g");

/** The address of a link, or null if it may not be one: a script, or a file of this machine. */
export function safeAddress(text) {
  try {
    const { protocol, href } = new URL(text);
    return ["http:", "https:", "mailto:"].includes(protocol) ? href : null;
  } catch {
    return null;
  }
}

/** The blocks of a text: [{start, end, build}]. A block with the same source and place looks the same again. */
export function blocksOf(source, leaf) {
  const lines = [];
  for (let start = 0; start <= source.length;) {
    const at = source.indexOf("\n", start);
    const end = at < 0 ? source.length : at;
    lines.push({ start, end });
    start = end + 1;
  }
  return parse(lines, { source, leaf, textOf: ({ start, end }) => source.slice(start, end) }, 0);
}

function parse(lines, context, depth) {
  const { textOf } = context;
  const blocks = [];
  const add = (first, last, build) => blocks.push({ start: lines[first].start, end: lines[last - 1].end, build });
  let i = 0;
  while (i < lines.length) {
    const line = textOf(lines[i]);
    const first = i;
    if (!line.trim()) {
      i += 1;
      continue;
    }
    const fence = FENCE.exec(line);
    if (fence) {
      const closing = new RegExp(`^ {0,3}${fence[2][0]}{${fence[2].length},}[ \\t]*$`);
      for (i += 1; i < lines.length && !closing.test(textOf(lines[i])); i += 1);
      const body = lines.slice(first + 1, i).map((each) => dedent(each, fence[1].length, context));
      i = Math.min(i + 1, lines.length);
      add(first, i, () => codeBlock(body, fence[3], context));
      continue;
    }
    const heading = HEADING.exec(line);
    if (heading) {
      i += 1;
      const closed = / +#+ *$/.exec(line);
      const inner = { start: lines[first].start + heading[0].length, end: lines[first].end - (closed && closed.index >= heading[0].length ? closed[0].length : 0) };
      add(first, i, () => h(`h${Math.min(6, heading[1].length + 2)}`, inline([inner], context)));
      continue;
    }
    if (RULE.test(line)) {
      i += 1;
      add(first, i, () => h("hr"));
      continue;
    }
    if (depth < DEEPEST && QUOTE.test(line)) {
      const inner = [];
      for (; i < lines.length && textOf(lines[i]).trim() && (QUOTE.test(textOf(lines[i])) || !beginsBlock(textOf(lines[i]))); i += 1) {
        inner.push({ start: lines[i].start + (QUOTE.exec(textOf(lines[i]))?.[0].length ?? 0), end: lines[i].end });
      }
      add(first, i, () => h("blockquote", build(parse(inner, context, depth + 1))));
      continue;
    }
    if (depth < DEEPEST && ITEM.test(line)) {
      const [items, next, loose] = readList(lines, i, context);
      const marker = ITEM.exec(line)[2];
      i = next;
      const ordered = /\d/.test(marker);
      add(first, i, () => h(ordered ? "ol" : "ul", { start: ordered && parseInt(marker, 10) !== 1 ? parseInt(marker, 10) : null },
        items.map((item) => h("li", listItem(item, loose, context, depth)))));
      continue;
    }
    if (line.includes("|") && i + 1 < lines.length && DIVIDER.test(textOf(lines[i + 1])) && cellsOf(lines[i], context).length === cellsOf(lines[i + 1], context).length) {
      for (i += 2; i < lines.length && textOf(lines[i]).includes("|"); i += 1);
      const [head, divider, ...rows] = lines.slice(first, i).map((each) => cellsOf(each, context));
      add(first, i, () => table(head, divider, rows, context));
      continue;
    }
    for (i += 1; i < lines.length && textOf(lines[i]).trim() && !beginsBlock(textOf(lines[i])); i += 1);
    const paragraph = lines.slice(first, i);
    add(first, i, () => h("p", inline(paragraph.map((each) => trimmed(each, context)), context)));
  }
  return blocks;
}

function build(blocks) {
  return blocks.map((block) => block.build());
}

/** Whether a line ends the paragraph before it. */
function beginsBlock(line) {
  const item = ITEM.exec(line);
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || Boolean(item && item[0].length < line.length && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1));
}

function indentOf(line) {
  return /^[ \t]*/.exec(line)[0].replaceAll("\t", "    ").length;
}

/** A line without at most `count` columns of white space. */
function dedent(line, count, { source }) {
  let { start } = line;
  for (let left = count; left > 0 && start < line.end && " \t".includes(source[start]); start += 1) left -= source[start] === "\t" ? 4 : 1;
  return { start, end: line.end };
}

function trimmed({ start, end }, { source }) {
  const text = source.slice(start, end);
  return { start: end - text.trimStart().length, end: start + text.trimEnd().length };
}

/** The items of a list, each as lines; the line after it; and whether there are empty lines between its blocks. */
function readList(lines, from, context) {
  const { textOf } = context;
  const kindOf = (found) => (/\d/.test(found[2]) ? found[2].at(-1) : found[2]);
  const kind = kindOf(ITEM.exec(textOf(lines[from])));
  const items = [];
  let [i, loose, width] = [from, false, 0];
  while (i < lines.length) {
    const line = textOf(lines[i]);
    const found = ITEM.exec(line);
    const empty = !line.trim();
    const isInside = items.length > 0 && indentOf(line) >= width;
    if (empty) {
      const next = lines.slice(i + 1).find((each) => textOf(each).trim());
      const goes = next && (indentOf(textOf(next)) >= width || (ITEM.test(textOf(next)) && kindOf(ITEM.exec(textOf(next))) === kind));
      if (!goes) break;
      loose = true;
      items.at(-1).push({ start: lines[i].end, end: lines[i].end });
    } else if (isInside) items.at(-1).push(dedent(lines[i], width, context));
    else if (found && kindOf(found) === kind && !RULE.test(line)) {
      width = found[1].length + found[2].length + Math.min(found[3].length || 1, 4);
      items.push([{ start: Math.min(lines[i].start + width, lines[i].end), end: lines[i].end }]);
    } else if (found || beginsBlock(line) || !items.at(-1).at(-1) || items.at(-1).at(-1).start === items.at(-1).at(-1).end) break;
    else items.at(-1).push(lines[i]);
    i += 1;
  }
  return [items, i, loose];
}

/** The content of an item. In a list without empty lines, its first paragraph is plain text. */
function listItem(lines, loose, context, depth) {
  const blocks = parse(lines, context, depth + 1).map((block) => block.build());
  return blocks.map((block) => (!loose && block.tagName === "P" ? [...block.childNodes] : block));
}

/** The cells of a row of a table. */
function cellsOf({ start, end }, { source }) {
  const found = [];
  let from = start;
  for (let i = start; i <= end; i += 1) {
    if (i < end && source[i] === "\\") i += 1;
    else if (i === end || source[i] === "|") {
      found.push({ start: from, end: i });
      from = i + 1;
    }
  }
  const isEmpty = (cell) => cell && !source.slice(cell.start, cell.end).trim();
  if (isEmpty(found[0])) found.shift();
  if (isEmpty(found.at(-1))) found.pop();
  return found;
}

function table(head, divider, rows, context) {
  const sides = divider.map(({ start, end }) => context.source.slice(start, end).trim()).map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : null));
  const cell = (name, place, i) => h(name, { scope: name === "th" ? "col" : null, css: sides[i] ? { "text-align": sides[i] } : {} }, place && inline([trimmed(place, context)], context));
  return scroller("Table", h("table", h("thead", h("tr", head.map((place, i) => cell("th", place, i)))), h("tbody", rows.map((row) => h("tr", head.map((_, i) => cell("td", row[i], i)))))));
}

function codeBlock(lines, language, context) {
  const text = lines.map(context.textOf).join("\n");
  const copy = button("Copy", async () => {
    copy.textContent = await copyText(text) ? "Copied" : "Not allowed";
    setTimeout(() => (copy.textContent = "Copy"), 2000);
  }, "small quiet", { key: null, label: "Copy the code" });
  const pieces = [];
  let at = 0;
  const parts = language || text.length < 20_000 ? highlight(text, language) : [[0, text.length, ""]];
  const places = lines.map(({ start, end }) => [at, (at += end - start + 1) - 1, start]);
  let row = 0;
  for (const [from, to, kind] of parts) {
    const inside = [];
    for (; row < places.length; row += 1) {
      const [begin, end, source] = places[row];
      const [low, high] = [Math.max(from, begin), Math.min(to, end)];
      if (low < high) inside.push(context.leaf(source + low - begin, source + high - begin));
      if (to <= end) break;
      inside.push("\n");
    }
    pieces.push(kind ? h("span", { class: kind }, inside) : inside);
  }
  return h("div.code-block", h("div.code-head", h("span", language || "code"), copy), h("pre", { tabindex: 0, role: "region", label: `Code${language ? `: ${language}` : ""}` }, h("code", pieces)));
}

/** Parts of code: [start, end, kind]. Comments, texts, numbers and the keywords of the common languages. */
function highlight(text, language) {
  if (!language || /^(text|txt|plain|plaintext|markdown|md|output|none)$/i.test(language)) return [[0, text.length, ""]];
  const pattern = CODE(HASH_COMMENTS.test(language) ? "#[^\\n]*" : /^(sql|lua|haskell|hs)$/i.test(language) ? "--[^\\n]*" : /^(html|xml|svg|vue)$/i.test(language) ? "<!--[^]*?-->" : "\\/\\/[^\\n]*|\\/\\*[^]*?\\*\\/");
  const isKeyword = (word) => KEYWORDS.has(/^sql$/i.test(language) ? word.toLowerCase() : word);
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(pattern)) {
    const kind = found[1] ? "code-comment" : found[2] ? "code-text" : found[3] ? "code-number" : isKeyword(found[4]) ? "code-word" : "";
    if (!kind) continue;
    if (found.index > at) parts.push([at, found.index, ""]);
    at = found.index + found[0].length;
    parts.push([found.index, at, kind]);
  }
  return at < text.length ? [...parts, [at, text.length, ""]] : parts;
}

/** Put a text into the clipboard; returns whether the browser allowed it. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** The elements of text with emphasis, code and links. lines: its lines, shown below each other. */
function inline(lines, context) {
  const text = lines.map(context.textOf).join("\n");
  const starts = [];
  let at = 0;
  for (const { start, end } of lines) {
    starts.push([at, start]);
    at += end - start + 1;
  }
  /** What to show of text[from, to). */
  function leaf(from, to) {
    const made = [];
    let row = starts.findLastIndex(([begin]) => begin <= from);
    for (let low = from; low < to; row += 1) {
      const next = starts[row + 1]?.[0] ?? text.length + 1;
      const high = Math.min(to, next - 1);
      if (low < high) made.push(context.leaf(starts[row][1] + low - starts[row][0], starts[row][1] + high - starts[row][0]));
      if (high < to) made.push(h("br"));
      low = high + 1;
    }
    return made;
  }
  return spans(text, 0, text.length, leaf, 0);
}

function spans(text, from, to, leaf, depth) {
  const made = [];
  const missing = new Set(); // marks that nothing closes from here on
  let plain = from;
  let i = from;
  function take(length, content) {
    if (i > plain) made.push(leaf(plain, i));
    made.push(content);
    i += length;
    plain = i;
  }
  while (i < to) {
    const c = text[i];
    const rest = () => text.slice(i, Math.min(to, i + 2000));
    if (c === "\\") {
      if (ESCAPE.test(text.slice(i, i + 2)) && i + 1 < to) take(2, leaf(i + 1, i + 2));
      else i += 1;
    } else if (c === "`") {
      const ticks = /^`+/.exec(rest())[0];
      const close = missing.has(ticks) ? -1 : closingTicks(text, i + ticks.length, to, ticks);
      if (close < 0) {
        missing.add(ticks);
        i += ticks.length;
      } else take(close + ticks.length - i, h("code", leaf(i + ticks.length, close)));
    } else if (c === "[" || (c === "!" && text[i + 1] === "[")) {
      const found = LINK.exec(rest());
      const address = found && safeAddress(found[3]);
      if (!found) i += 1;
      else {
        const begin = i + found[1].length + 1;
        const inside = depth < DEEPEST ? spans(text, begin, begin + found[2].length, leaf, depth + 1) : leaf(begin, begin + found[2].length);
        take(found[0].length, address ? link(address, found[1] ? ["Picture: ", inside] : inside) : inside);
      }
    } else if (c === "h" && URL_TEXT.test(rest()) && !/\w/.test(text[i - 1] ?? "")) {
      const [found] = URL_TEXT.exec(rest());
      take(found.length, link(safeAddress(found), leaf(i, i + found.length)));
    } else if ("*_~".includes(c) && depth < DEEPEST) {
      const mark = MARKS.find(([sign]) => text.startsWith(sign, i) && !missing.has(sign));
      const close = mark && opens(text, i, mark[0], to) ? closing(text, i + mark[0].length, to, mark[0]) : -1;
      if (close >= 0) {
        const inside = spans(text, i + mark[0].length, close, leaf, depth + 1);
        take(close + mark[0].length - i, mark.slice(1).reduceRight((content, name) => h(name, content), inside));
      } else {
        if (mark && close === -1 && opens(text, i, mark[0], to)) missing.add(mark[0]);
        else i += /^([*_~])\1*/.exec(rest())[0].length;
      }
    } else i += 1;
  }
  if (to > plain) made.push(leaf(plain, to));
  return made;
}

function link(address, content) {
  return h("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow", title: address }, content);
}

function closingTicks(text, from, to, ticks) {
  for (let at = text.indexOf(ticks, from); at >= 0 && at + ticks.length <= to; at = text.indexOf(ticks, at)) {
    let end = at;
    while (text[end] === "`") end += 1;
    if (end - at === ticks.length) return at;
    at = end;
  }
  return -1;
}

/** Whether a mark can begin emphasis: text follows; for _, no word comes before. */
function opens(text, at, sign, to) {
  const next = text[at + sign.length];
  return at + sign.length < to && /\S/.test(next) && next !== sign[0] && !(sign[0] === "_" && /\w/.test(text[at - 1] ?? ""));
}

/** The place of the mark that ends emphasis, or -1. */
function closing(text, from, to, sign) {
  for (let at = text.indexOf(sign, from + 1); at >= 0 && at + sign.length <= to; at = text.indexOf(sign, at + 1)) {
    const [before, after] = [text[at - 1], at + sign.length < to ? text[at + sign.length] : ""];
    if (/\s/.test(before) || before === "\\") continue;
    if (sign.length === 1 && (before === sign || after === sign)) {
      while (text[at + 1] === sign) at += 1; // a longer mark inside
      continue;
    }
    if (sign[0] === "_" && /\w/.test(after ?? "")) continue;
    return at;
  }
  return -1;
}
