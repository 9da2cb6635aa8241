// The heading of a step: the token, its numbers, and the token that the same noise picks under the settings.
import {button, classes, fixed, h, integer, percent, put, token} from "./dom.js";
import {currentRun, currentToken} from "./state.js";
import {remarks} from "./text.js";

export function createStepHeading(store, session) {
  const { state } = store;
  const back = button("←", () => session.select(state.step - 1), "icon", { tip: "Previous step" });
  const next = button("→", () => session.select(state.step + 1), "icon", { tip: "Next step" });
  const jump = h("input.input.jump", { type: "number", min: 0, label: "Step", onchange: () => jump.value && session.select(Number(jump.value)) });
  const [total, generated, picked, facts, notes] = [h("span.muted"), h("div.chip"), h("div.chip"), h("dl.facts"), h("p.help")];
  const box = h("div.step", h("div.step-walk", h("h2.title", "Step"), back, jump, next, total), h("div.chips", generated, picked), facts, notes);
  let announced = "";

  function show() {
    const [run, t] = [currentRun(state), currentToken(state)];
    box.hidden = !t;
    if (!t) return;
    const count = run.tokens.length;
    if (document.activeElement !== jump) jump.value = t.step;
    jump.max = count - 1;
    total.textContent = `of ${integer(count)}, from 0`;
    back.disabled = t.step === 0;
    next.disabled = t.step >= count - 1;
    const chosen = state.view?.picked;
    const differs = Boolean(chosen && chosen.id !== t.id);
    put(generated, h("span.sign-a", { "aria-hidden": "true" }, "●"), h("span.muted", t.origin === "given" ? "given" : "generated"), token(t.text));
    put(picked, h("span.sign-b", { "aria-hidden": "true" }, "◆"), h("span.muted", "same noise, these settings"), chosen ? token(chosen.text) : (state.view?.error ?? "–"));
    picked.classList.toggle(classes("differs"), differs);
    const nats = (x) => (x === null ? "–" : `${fixed(x, 2)} nats`);
    const values = [
      ["model", percent(t.model_probability), "probability before all stages"],
      ["sampled with", percent(t.probability), "probability after all stages"],
      ["rank", integer(t.rank), "by the model's probability"],
      ["surprisal", nats(t.surprisal), "−ln of the model's probability"],
      ["entropy", nats(t.entropy), "of the model's distribution"],
      ["kept", integer(t.kept), "tokens that survived all stages"],
    ];
    put(facts, values.map(([name, value, title]) => h("div", { title }, h("dt", name), h("dd", value))));
    notes.textContent = remarks(run, t).join("; ");
    const news = differs ? `The same noise now picks ${JSON.stringify(chosen.text)} instead of ${JSON.stringify(t.text)}.` : "";
    if (news !== announced && (news || state.status === announced)) store.set({ status: news });
    announced = news;
  }
  store.on(["run", "step", "view", "first", "tokens"], show);
  show();
  return box;
}
