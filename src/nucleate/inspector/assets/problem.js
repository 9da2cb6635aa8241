// What went wrong, and what to do about it. Also the field for an API key.
import {button, classes, h, put, uid} from "./dom.js";
import {currentRun} from "./state.js";

export function createProblem(store, session, api, retry) {
  const { state } = store;
  const box = h("div.problem", { role: "alert", hidden: true });

  function keyForm() {
    const id = uid();
    const input = h("input.input", { type: "password", id, autocomplete: "off", required: true, pattern: "[!-~]+", title: "ASCII characters without spaces" });
    const onsubmit = (event) => {
      event.preventDefault();
      api.key = input.value;
      store.set({ problem: null });
      retry();
    };
    return [api.key && h("p", h("strong", "The server did not accept this key.")), h("p", "This server needs an API key. It is kept in this tab only, until the tab is closed."),
      h("form.inline", { onsubmit }, h("label.label", { for: id }, "API key"), input, h("button.button.primary", { type: "submit" }, "Use this key"))];
  }

  store.on(["problem"], ({ problem }) => {
    box.hidden = !problem;
    box.classList.toggle(classes("mild"), problem?.kind === "stored");
    const { kind, message, param } = problem ?? {};
    const run = currentRun(state);
    const again = () => session.generate({ input: run.input, parent: null, params: run.params }, { step: state.step });
    if (kind === "key") put(box, keyForm());
    else if (kind === "stored" && api.live) {
      put(box, h("p", "The logits of this step are no longer stored; generate again to see its stages."), run?.input && button("Generate again", again, "small"));
    } else {
      put(box, h("p", param && !message.includes(param) && h("strong", `${param}: `), message), button("Dismiss", () => store.set({ problem: null }), "small"));
    }
  });
  return box;
}
