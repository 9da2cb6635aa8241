// The stages as a picture of its own: SVG with presentation attributes only, and PNG made from it.
import {fixed, integer, percent, svg, visible} from "./dom.js";
import {barHeight, columnsOf, lastStage, mostOf, removedAt, restOf, titleOf} from "./view.js";

const SIZE = { left: 410, numbers: 232, cell: 54, row: 62, top: 74 }; // pixels
const COUNT = 14; // tokens
const MONO = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
const SANS = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif";
const SOFT = { fill: "#586174", "font-size": 11 };
const END = { ...SOFT, "text-anchor": "end" };
const MIDDLE = { ...SOFT, "text-anchor": "middle" };

function write(x, y, content, props) {
  return svg("text", { x, y, fill: "#1a202b", "font-size": 12, "font-family": SANS, ...props }, content);
}

function short(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** The picture of a step, as an SVG element. */
export function ladderPicture(view, heading) {
  const columns = columnsOf(view, COUNT, null);
  const rows = view.stages.slice(0, lastStage(view) + 1);
  const [width, height] = [SIZE.left + SIZE.cell * (columns.length + 1) + 16, SIZE.top + SIZE.row * rows.length + 34];
  const most = mostOf(view, columns);
  const middleOf = (column) => SIZE.left + SIZE.cell * (column + 0.5);

  function bar(column, y, p, fill, text) {
    const tall = 34 * barHeight(p, "linear", most);
    return [svg("rect", { x: middleOf(column) - 12, y: y + 36 - tall, width: 24, height: tall, fill, rx: 2 }), write(middleOf(column), y + 50, text, { ...MIDDLE, "font-size": 10 })];
  }

  function head(i, column) {
    const t = view.tokens[i];
    const signs = `${t.id === view.sampled?.id ? "●" : ""}${t.id === view.picked?.id ? "◆" : ""}`;
    return [write(middleOf(column), 60, short(visible(t.text), 7), { ...MIDDLE, "font-family": MONO, fill: "#1a202b" }), write(middleOf(column), 45, signs, { ...MIDDLE, fill: "#1f5fbf" })];
  }

  function line(stage, row) {
    const y = SIZE.top + SIZE.row * row;
    const numbers = [integer(stage.kept), fixed(stage.entropy), row ? percent(stage.removed_probability) : "", row ? fixed(stage.kl) : ""];
    const cell = (i, column) => {
      if (stage.p[i] !== null) return bar(column, y, stage.p[i], "#6b90c9", percent(stage.p[i]));
      return removedAt(view, i) === row ? bar(column, y, view.stages[row - 1].p[i], "#d3d8e0", "✕") : [];
    };
    return [svg("line", { x1: 16, x2: width - 16, y1: y - 4, y2: y - 4, stroke: "#e2e6ec" }),
      write(16, y + 24, short(titleOf(stage).join(" "), 26), { "font-weight": 600, "font-family": MONO }),
      numbers.map((text, i) => write(SIZE.numbers + 56 * i, y + 24, text, { ...END, fill: "#1a202b" })),
      columns.map(cell), write(middleOf(columns.length) + 16, y + 24, percent(restOf(stage, columns)), { ...END, fill: "#1a202b" })];
  }

  const picked = view.picked ? `◆ picked: ${JSON.stringify(view.picked.text)}` : (view.error ?? "");
  const foot = `${picked}   ● generated: ${JSON.stringify(view.sampled.text)}   seed ${view.seed}, step ${view.step}   entropy and KL in nats`;
  return svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` },
    svg("rect", { width, height, fill: "#ffffff" }), write(16, 24, heading, { "font-size": 14, "font-weight": 600 }),
    ["kept", "entropy", "removed", "KL"].map((name, i) => write(SIZE.numbers + 56 * i, 60, name, END)),
    columns.map(head), write(middleOf(columns.length) + 16, 60, "others", END), rows.map(line), write(16, height - 12, foot, SOFT));
}

export function svgText(picture) {
  return new XMLSerializer().serializeToString(picture);
}

/** The picture as a PNG of twice its size. */
export async function pngOf(picture) {
  const url = URL.createObjectURL(new Blob([svgText(picture)], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = url;
    await image.decode();
    const canvas = document.createElement("canvas");
    Object.assign(canvas, { width: 2 * image.naturalWidth, height: 2 * image.naturalHeight });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  } finally {
    URL.revokeObjectURL(url);
  }
}
