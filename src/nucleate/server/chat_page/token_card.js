// The card of a token: its probability, the alternatives, and the way to the inspector.
import {h, integer, percent, put, quoted, token} from "./dom.js";
import {inspectorLink, placeOf} from "./replies.js";

const OPEN_MS = 250; // how long a pointer rests on a token before its card opens: one that passes opens none
const CLOSE_MS = 220;

/** thread: the element with the replies, whose tokens have data-step. find(id): a reply; context: {store, actions}. */
export function createTokenCard(thread, root, find, { store, actions }) {
  const { state } = store;
  const card = h("div.token-card", { role: "dialog", label: "Token", hidden: true, key: "token card" });
  let [chosen, waiting, timer, pinned] = [null, null, 0, false]; // elements: the token that is shown, and the one that will be

  function place() {
    const [box, outer] = [chosen.getClientRects()[0] ?? chosen.getBoundingClientRect(), root.getBoundingClientRect()];
    const { offsetWidth: width, offsetHeight: height } = card;
    const left = Math.min(Math.max(8, box.left - outer.left - 12), outer.width - width - 8);
    const below = box.bottom - outer.top + 6;
    const top = below + height > outer.height - 8 && box.top - outer.top > height + 12 ? box.top - outer.top - height - 6 : Math.min(below, outer.height - height - 8);
    card.style.setProperty("left", `${left}px`);
    card.style.setProperty("top", `${Math.max(8, top)}px`);
  }

  function alternative(node, step, other, most, generating) {
    const p = Math.exp(other.logprob);
    const t = node.tokens[step];
    const own = other.text === t.text && (other.id === null || t.id === null || other.id === t.id);
    const ends = state.settings.model.ends.includes(other.text);
    const bar = [h("span.alternative-bar", { "aria-hidden": "true" }, h("span", { css: { width: `${(100 * p) / most}%` } })), h("span.alternative-p", percent(p))];
    const can = !own && !generating && placeOf(node, step) >= 0 && other.text && !other.text.includes("\ufffd") && !ends;
    const branch = () => {
      hide();
      actions.branch(state.chat, node, step, other.text);
    };
    return h("li", { class: own ? "own" : "" }, can ? h("button.alternative", { onclick: branch, tip: `Continue with ${quoted(other.text)} (${percent(p)}) instead`, key: `alternative ${other.text}` }, token(other.text), bar) : h("div.alternative", { title: ends ? "It would end the reply." : null }, token(other.text), bar));
  }

  function show(element, pin = false) {
    const node = find(element.closest("[data-node]")?.dataset.node);
    const step = Number(element.dataset.step);
    const t = node?.tokens[step];
    if (!t) return;
    mark(null);
    waiting = null;
    [chosen, pinned] = [element, pin];
    mark(element);
    const generating = actions.nodeOf(state.chat) !== null;
    const most = Math.max(...[t, ...t.top].map(({ logprob }) => Math.exp(logprob)));
    const inTop = t.top.some((other) => other.text === t.text);
    const first = node.tokens.length - node.own;
    put(card,
      h("div.token-head", token(t.text, "big"), h("span", h("strong", percent(Math.exp(t.logprob))), t.rank !== null && h("span.muted", ` rank ${integer(t.rank)}`), t.chosen && h("span.muted", " chosen by you"))),
      h("ol.alternatives", { label: "The likeliest tokens here; choose one to continue with it" }, [...t.top, ...(inTop ? [] : [t])].map((other) => alternative(node, step, other, most, generating))),
      state.settings.inspector && step >= first && node.seed !== null && h("a.inspect-link", { href: inspectorLink(state.chat, node, step), target: "_blank", rel: "opener", key: "inspect" }, "Inspect this token"));
    card.hidden = false;
    place();
  }

  function mark(element) {
    if (element) element.setAttribute("data-shown", "");
    else chosen?.removeAttribute("data-shown");
  }

  function hide() {
    clearTimeout(timer);
    mark(null);
    const had = card.contains(document.activeElement);
    const reply = chosen?.closest("[data-node]");
    [chosen, pinned] = [null, false];
    card.hidden = true;
    if (had) reply?.focus();
  }

  const tokenAt = (event) => event.target.closest?.("[data-step]");
  let last = ""; // where the pointer was: text that moves below a pointer that rests opens nothing
  const open = () => (timer = setTimeout(() => waiting?.isConnected && show(waiting), card.hidden ? OPEN_MS : 60));
  thread.addEventListener("pointermove", ({ clientX, clientY }) => {
    last = `${clientX} ${clientY}`;
    if (!waiting || !card.hidden) return;
    clearTimeout(timer);
    open();
  }, { passive: true });
  thread.addEventListener("pointerover", (event) => {
    const element = tokenAt(event);
    const rests = last === `${event.clientX} ${event.clientY}`;
    if (event.pointerType === "touch" || pinned || rests || !element) return;
    clearTimeout(timer);
    waiting = element;
    open();
  });
  const leave = (event) => {
    if (pinned || event.pointerType === "touch") return;
    clearTimeout(timer);
    waiting = null;
    timer = setTimeout(hide, CLOSE_MS);
  };
  thread.addEventListener("pointerout", (event) => tokenAt(event) && leave(event));
  card.addEventListener("pointerenter", () => clearTimeout(timer));
  card.addEventListener("pointerleave", leave);
  thread.addEventListener("click", (event) => {
    const element = tokenAt(event);
    if (!element || event.target.closest("a") || String(getSelection())) return;
    clearTimeout(timer);
    if (pinned && element === chosen) hide();
    else show(element, true);
  });
  thread.addEventListener("scroll", () => chosen && hide(), { passive: true });
  document.addEventListener("pointerdown", (event) => chosen && !card.contains(event.target) && !tokenAt(event) && hide());

  /** The arrow keys walk through the tokens of a reply that has the focus; Enter goes into the card. */
  thread.addEventListener("keydown", (event) => {
    const { key, target, ctrlKey, metaKey, altKey } = event;
    if (!target.matches?.("[data-node]") || ctrlKey || metaKey || altKey) return;
    const all = [...target.querySelectorAll("[data-step]")];
    const at = target.contains(chosen) ? all.findIndex((element) => element.dataset.step === chosen.dataset.step) : -1;
    const to = { ArrowRight: at + 1, ArrowLeft: at < 0 ? 0 : at - 1, Home: 0, End: all.length - 1 }[key];
    if (to !== undefined && all.length) {
      const next = all[Math.min(Math.max(0, to), all.length - 1)];
      next.scrollIntoView({ block: "nearest" });
      show(next, true);
    } else if (key === "Enter" && chosen) card.querySelector("button, a")?.focus();
    else return;
    event.preventDefault();
  });
  return { element: card, hide, isOpen: () => !card.hidden };
}
