// What goes in: a prompt as text, or a chat.
import {button, h, put, uid} from "./dom.js";

/** The form for the input, with the button that generates. */
export function createPrompt(store, session, api) {
  const { state } = store;
  const write = (patch) => store.set({ input: { ...state.input, ...patch } });
  const id = uid();
  const text = h("textarea.input.text", { id, rows: 1, placeholder: "Text to continue", key: "prompt", oninput: () => write({ prompt: text.value }) });
  const messages = h("ol.messages", { label: "Messages" });

  function messageRow(message, i) {
    const role = h("select.select", { label: `Role of message ${i + 1}`, onchange: changed }, ["system", "user", "assistant"].map((value) => h("option", { value }, value)));
    const content = h("textarea.input.text", { rows: 1, label: `Message ${i + 1}`, value: message.content, oninput: changed });
    role.value = message.role;
    function changed() {
      write({ messages: state.input.messages.with(i, { role: role.value, content: content.value }) });
    }
    return h("li.message", role, content, button("×", () => setMessages(state.input.messages.toSpliced(i, 1)), "icon", { tip: `Remove message ${i + 1}` }));
  }

  function setMessages(list) {
    write({ messages: list });
    put(messages, list?.map(messageRow));
  }

  function addMessage() {
    const list = state.input.messages;
    setMessages([...list, { role: list.at(-1)?.role === "user" ? "assistant" : "user", content: "" }]);
    messages.lastElementChild.querySelector("textarea").focus();
  }

  const chat = h("div.chat", messages, button("Add message", addMessage, "small"));
  const modes = h("div.segments", { role: "group", label: "Kind of input", hidden: !state.settings.model.chat },
    button("Text", () => setMessages(null), "segment"), button("Chat", () => setMessages([{ role: "user", content: state.input.prompt }]), "segment"));
  const go = h("button.button.primary", { type: "submit", title: "Ctrl + Enter" }, "Generate");
  const stop = button("Stop", () => session.stop(), "", { title: "Escape" });
  const isReady = () => (state.input.messages ? state.input.messages.some(({ content }) => content.trim()) : state.input.prompt);
  function onsubmit(event) {
    event.preventDefault();
    if (isReady()) session.generate({ input: { ...state.input }, params: state.params });
  }

  function show() {
    const isChat = Boolean(state.input.messages);
    text.hidden = isChat;
    chat.hidden = !isChat;
    for (const item of modes.children) item.setAttribute("aria-pressed", String((item.textContent === "Chat") === isChat));
    if (document.activeElement !== text) text.value = state.input.prompt;
    go.disabled = !isReady();
    go.hidden = state.generating;
    stop.hidden = !state.generating;
  }
  store.on(["input", "generating"], show);
  setMessages(state.input.messages);
  show();
  return h("form.prompt", { label: "Input", hidden: !api.live, onsubmit },
    h("div.prompt-main", h("div.prompt-head", h("label.label", { for: id }, "Prompt"), modes), text, chat), h("div.prompt-buttons", go, stop));
}
