// The draw of a step, shown as what it is: a race with Gumbel noise, a cumulative interval, or the highest score.
import {button, fixed, grid, h, percent, put, quoted, signed, svg, token} from "./dom.js";

const FIRST = 8; // entries shown at first

const TITLES = { each: "The draw: a Gumbel-max race", one: "The draw: inverse CDF", none: "The draw: greedy", hidden: "The draw" };

const GUMBEL = `Every score (log-probability up to a constant) gets its own Gumbel noise, a function of seed, step and id;
  the highest total wins. This samples exactly from the distribution. The race runs first among groups of 256
  consecutive ids, whose score is the log-sum-exp of their tokens, then among the tokens of the winning group.`;

/** The score, the noise as a line, and the total. low, high: the ends of the axis; finish: the winning total. */
function raceBar(entry, low, high, finish) {
  const at = (x) => `${(3 + (94 * (x - low)) / (high - low || 1)).toFixed(2)}%`;
  const line = (kind, from, to, y1, y2) => svg(`line.${kind}`, { x1: at(from), x2: at(to), y1, y2 });
  return svg("svg", { "aria-hidden": "true", height: 22 },
    line("finish", finish, finish, 0, 22),
    line(entry.noise < 0 ? "noise-down" : "noise-up", entry.score, entry.total, 11, 11),
    line("score-mark", entry.score, entry.score, 5, 17),
    svg("circle", { class: entry.won ? "total-won" : "total", cx: at(entry.total), cy: 11, r: entry.won ? 5 : 3.5 }));
}

function race(title, heading, entries, nameOf) {
  const finish = Math.max(...entries.map((entry) => entry.total));
  const box = h("div.stack");
  function show(count) {
    const shown = entries.slice(0, count);
    const values = shown.flatMap((entry) => [entry.score, entry.total]);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const row = (entry) => Object.assign([nameOf(entry), fixed(entry.score), signed(entry.noise), h("b", fixed(entry.total)),
      raceBar(entry, low, high, finish)], { won: entry.won });
    const more = entries.length > count && button(`Show all ${entries.length}`, () => show(entries.length), "small");
    put(box, h("h3.subtitle", title), grid(title, [heading, "#score", "#+ noise", "#= total", "~│ score   ● total"], shown.map(row)), more);
  }
  show(FIRST);
  return box;
}

function gumbelDraw({ groups, tokens }) {
  const name = ({ group, first_id: first, last_id: last }) => h("span", { title: `group ${group}` }, `${first}–${last}`);
  return [h("p.help", GUMBEL), h("div.columns", race("1. Groups of 256 ids", "ids", groups, name),
    race("2. Tokens of the winning group", "token", tokens, (t) => token(t.text)))];
}

function categoricalDraw({ u, tokens }) {
  const at = (x) => `${(100 * x).toFixed(4)}%`;
  const part = (t, i) => svg("rect", { class: t.won ? "part-won" : i % 2 ? "part-odd" : "part-even", x: at(t.low), width: at(t.high - t.low), y: 14, height: 26 },
    svg("title", `${quoted(t.text)}: ${t.low.toFixed(4)} to ${t.high.toFixed(4)}`));
  const right = u > 0.85;
  const row = (t) => Object.assign([token(t.text), t.low.toFixed(6), t.high.toFixed(6), percent(t.high - t.low)], { won: t.won });
  return [
    h("p.help", `One uniform number, u = ${u.toFixed(6)}, a function of seed and step. The tokens divide the interval from 0 to 1 by
      their probabilities, from the most likely down; the token whose part holds u is picked.`),
    svg("svg.interval", { height: 46, role: "img", label: `The interval from 0 to 1, with u at ${u.toFixed(4)}` }, tokens.map(part),
      svg("line.u", { x1: at(u), x2: at(u), y1: 4, y2: 46 }),
      svg("text.u-label", { x: at(u), dx: right ? -5 : 5, y: 11, "text-anchor": right ? "end" : "start" }, `u = ${u.toFixed(4)}`)),
    grid("Intervals", ["token", "#from", "#to", "#probability"], tokens.filter((t, i) => i < FIRST || t.won).map(row)),
  ];
}

function greedyDraw({ tokens }) {
  const row = (t) => Object.assign([token(t.text), fixed(t.score)], { won: t.won });
  return [h("p.help", "No noise: the token with the highest score is picked, and the lowest id among equal ones."),
    grid("Scores", ["token", "#score"], tokens.slice(0, FIRST).map(row))];
}

/** The draw of the step that is shown. */
export function createRace(store) {
  const box = h("div.draw.stack", { hidden: true });
  const kinds = { each: gumbelDraw, one: categoricalDraw, none: greedyDraw };
  store.on(["view"], ({ view }) => {
    box.hidden = !view;
    if (!view) return;
    const { draw, error, seed, step } = view;
    const words = draw ? "The noise comes from a watermark key, which the server does not show." : (error ?? "No token was drawn at this step.");
    put(box, h("h3.subtitle", TITLES[draw?.kind] ?? "No draw", h("span.muted", `  seed ${seed}, step ${step}`)),
      draw && draw.kind in kinds ? kinds[draw.kind](draw) : h("p.help", words));
  });
  return box;
}
