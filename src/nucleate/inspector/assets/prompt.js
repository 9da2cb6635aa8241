// What goes in: a prompt as text or as token ids, or a chat, which keeps each reply.
import {button, h, plural, put, uid} from "./dom.js";
import {same} from "./params.js";
import {currentRun} from "./state.js";
import {textOf} from "./text.js";

/** The form for the input, with the button that generates. */
export function createPrompt(store, session, api) {
  const { state } = store;
  const write = (patch) => store.set({ input: { ...state.input, ...patch } });
  const id = uid();
  const text = h("textarea.input.text", { id, rows: 1, key: "prompt", oninput: () => write({ prompt: text.value }) });
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
    button("Text", () => setMessages(null), "segment"), button("Chat", () => setMessages([{ role: "user", content: text.value }]), "segment"));
  const go = h("button.button.primary", { type: "submit", title: "Ctrl + Enter" }, "Generate");
  const stop = button("Stop", () => session.stop(), "", { title: "Escape" });
  const isReady = () => (state.input.messages ? asked().length : state.input.prompt.length);
  function onsubmit(event) {
    event.preventDefault();
    const messages = state.input.messages && asked();
    if (isReady()) session.generate({ input: { ...state.input, messages }, params: state.params });
  }

  /** The messages of a request: without empty ones at the end, and then without a reply that is generated again. */
  function asked() {
    const sent = state.input.messages.slice(0, 1 + state.input.messages.findLastIndex(({ content }) => content.trim()));
    while (sent.at(-1)?.reply) sent.pop();
    return sent.map(({ role, content }) => ({ role, content }));
  }

  /** Add the reply to the messages, and an empty one for what comes next. */
  function keepReply() {
    const run = currentRun(state);
    if (!run?.end || run.parent || !state.input.messages || !same(run.input?.messages, asked())) return;
    setMessages([...run.input.messages, { role: "assistant", content: textOf(run), reply: true }, { role: "user", content: "" }]);
  }

  let generated = false;
  function show() {
    const isChat = Boolean(state.input.messages);
    if (generated && !state.generating) keepReply();
    generated = state.generating;
    text.hidden = isChat;
    chat.hidden = !isChat;
    for (const item of modes.children) item.setAttribute("aria-pressed", String((item.textContent === "Chat") === isChat));
    const ids = Array.isArray(state.input.prompt);
    if (document.activeElement !== text) text.value = ids ? "" : state.input.prompt;
    text.placeholder = ids ? `${plural(state.input.prompt.length, "token")}, as they were given. Or text to continue` : "Text to continue";
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
