// The chat page: conversations with the model of this server, in one page of modules without a build step.
import {HttpApi, parseJson, toJson} from "./api.js";
import {createKeysHelp} from "./keys.js";
import {button, h, integer, keepFocus, put, uid} from "./dom.js";
import {createProblem} from "./problem.js";
import {METRICS} from "./scales.js";
import {createStore} from "./state.js";
import {withCompleteOrder, withValue} from "./params.js";
import {addNode, fromDocument, newConversation, newId, openDatabase, pathOf, toDocument} from "./conversations.js";
import {icon, iconButton} from "./icons.js";
import {createPanel, readTools} from "./panel.js";
import {createReplies} from "./replies.js";
import {createRow} from "./messages.js";
import {createTokenCard} from "./token_card.js";

const SETTINGS = "nucleate-chat";
const WIDE = matchMedia("(min-width: 900px)");
const HAS_KEYS = matchMedia("(hover: hover)"); // a keyboard is likely; on a phone, Enter is a new line
const KEYS = {
  Enter: "send",
  "Shift + Enter": "new line",
  Esc: "stop; close what is open",
  "↑": "in an empty field: change the last message",
  "← →": "in a reply: walk through its tokens; Enter: into the card",
  "Ctrl + Shift + O": "new conversation",
  "Ctrl + ,": "settings",
};
const EXAMPLES = {
  bundled: { chat: ["Tell me a story about a brave little dog.", "Write a story about a rainy day.", "Tell me a story with a cat and a big red ball."], text: ["Once upon a time", "One day, a girl named Mia found a map.", "The little dog was sad because"] },
  other: { chat: ["Explain to a child how a rainbow is made.", "Write a Python function that finds the first repeated word of a text.", "Compare three ways to sort a list, as a table."], text: ["Once upon a time", "The three most important inventions are", "def fibonacci(n):\n"] },
};

/** What is kept in the browser besides the conversations. */
function readKept() {
  try {
    const { params = {}, presets = {}, toolsText = "", colours = false, theme = null } = JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
    return { params: { ...params }, presets: { ...presets }, toolsText: String(toolsText), tools: readTools(String(toolsText)), colours: Boolean(colours), theme };
  } catch {
    return { params: {}, presets: {}, toolsText: "", tools: [], colours: false, theme: null };
  }
}

const root = document.getElementById("nci-root");
const api = Object.assign(new HttpApi(""), { settings: () => api.json("chat/api/settings") });
const store = createStore({
  ...readKept(), settings: null, heads: [], chat: null, status: "", problem: null,
  editing: "A", paramsB: null, generating: false, runs: new Map(), run: null, // what the controls of the inspector read
});
const { state } = store;
if (state.theme) root.dataset.theme = state.theme;

function remember() {
  const { params, presets, toolsText, colours, theme } = state;
  try {
    localStorage.setItem(SETTINGS, JSON.stringify({ params, presets, toolsText, colours, theme }));
  } catch { /* a browser that keeps nothing */ }
}

function download(name, value) {
  const href = URL.createObjectURL(new Blob([toJson(value, 1)], { type: "application/json" }));
  h("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

async function start() {
  let settings;
  try {
    settings = await api.settings();
  } catch (error) {
    loading.remove();
    store.set({ problem: { message: error.message, kind: error.status === 401 ? "key" : "other", param: null } });
    return;
  }
  store.set({ settings, problem: null });
  build(await openDatabase());
}

function build(database) {
  const { settings } = state;
  const { model } = settings;
  const open = new Map(); // conversations that were loaded or made, by id
  const defaultMode = model.chat ? "chat" : "text";

  async function persist(conversation) {
    if (conversation.removed) return;
    open.set(conversation.id, conversation);
    conversation.updated = Date.now();
    await database.save(conversation);
    store.set({ heads: await database.heads() });
  }

  const replies = createReplies(store, api, persist);
  const setParams = (params) => {
    store.set({ params: withCompleteOrder(settings, params), problem: state.problem?.kind === "key" ? state.problem : null });
    remember();
  };
  const session = { setParams };

  /** Show a conversation. */
  function show(conversation) {
    card.hide();
    store.set({ chat: conversation });
    store.touch("chat");
    showAddress();
    if (!WIDE.matches) sidebar.hidden = true;
    follows = true;
  }

  /** The address names the conversation, so that the page can be loaded again. */
  function showAddress() {
    const { id, leaf } = state.chat;
    history.replaceState(null, "", leaf ? `#${id}` : location.pathname + location.search);
  }

  function begin(mode = state.chat?.mode ?? defaultMode) {
    show(newConversation(mode, state.chat?.leaf ? "" : state.chat?.system));
    focusField();
  }

  async function load(id) {
    if (!open.has(id)) open.set(id, await database.load(id));
    show(open.get(id));
  }

  function send(text) {
    const { chat } = state;
    if (!text.trim() || replies.nodeOf(chat)) return;
    follows = true;
    if (!chat.leaf) queueMicrotask(showAddress);
    replies.reply(chat, addNode(chat, chat.leaf, { role: "user", content: text }).id);
  }

  // the list of conversations
  const search = h("input.input", { type: "search", placeholder: "Search", label: "Search the conversations", oninput: () => showList() });
  const list = h("ul.chats");
  const picker = h("input", { type: "file", accept: ".json,application/json", hidden: true, label: "Saved conversations", onchange: () => picker.files.length && importFile(picker.files[0]) });
  const more = h("div.side-foot",
    button("Import", () => picker.click(), "small quiet", { title: "Conversations from a file" }),
    button("Export all", async () => download("nucleate-conversations.json", toDocument(await database.all())), "small quiet", { title: "All conversations, as a file" }),
    h("a.button.small.quiet", { href: "docs" }, "API"), settings.inspector && h("a.button.small.quiet", { href: "inspector" }, "Inspector"));
  const sidebar = h("nav.drawer.list-side", { label: "Conversations", hidden: !WIDE.matches },
    h("div.drawer-head", h("p.brand", "nucleate"), iconButton("close", "Close the list", () => toggle(sidebar, menuButton))),
    h("button.button.new-chat", { onclick: () => begin(), key: "new" }, icon("add"), "New conversation"), search, list, picker, !database.kept && h("p.help", "This browser keeps nothing: conversations are lost with this page."), more);

  async function importFile(file) {
    try {
      const found = fromDocument(parseJson(await file.text()));
      const known = new Map(state.heads.map((head) => [head.id, head]));
      const fresh = found.filter(({ id, updated }) => known.get(id)?.updated !== updated);
      for (const conversation of fresh) {
        if (known.has(conversation.id)) conversation.id = newId();
        await database.save(conversation);
      }
      store.set({ heads: await database.heads(), status: `${fresh.length} of ${found.length} conversations were added.` });
      if (fresh.length) load(fresh.at(-1).id);
    } catch (error) {
      store.set({ problem: { message: error instanceof SyntaxError ? "This file is not JSON." : error.message, kind: "other", param: null } });
    }
    picker.value = "";
  }

  /** Take over what another tab changed in the meantime. */
  async function refresh() {
    const heads = await database.heads();
    store.set({ heads });
    for (const { id, updated } of heads) {
      const conversation = open.get(id);
      if (conversation && updated > conversation.updated && !replies.nodeOf(conversation)) open.delete(id);
    }
    if (heads.some(({ id }) => id === state.chat.id) && !open.has(state.chat.id)) load(state.chat.id);
  }

  function ask(question, action, act) {
    const dialog = h("dialog.dialog", { label: question, onclose: () => dialog.remove() }, h("p", question),
      h("div.tools", button(action, () => { dialog.close(); act(); }, "primary"), button("Cancel", () => dialog.close())));
    root.append(dialog);
    dialog.showModal();
  }

  function rename(head) {
    const id = uid();
    const input = h("input.input", { id, value: head.title, required: true, maxlength: 120 });
    const dialog = h("dialog.dialog", { label: "Rename", onclose: () => dialog.remove() }, h("form.stack", {
      async onsubmit(event) {
        event.preventDefault();
        const conversation = open.get(head.id) ?? await database.load(head.id);
        conversation.title = input.value.trim() || conversation.title;
        await database.save(conversation);
        store.set({ heads: await database.heads() });
        dialog.close();
        store.touch("chat");
      },
    }, h("label.label", { for: id }, "Title"), input, h("div.tools", h("button.button.primary", { type: "submit" }, "Rename"), button("Cancel", () => dialog.close()))));
    root.append(dialog);
    dialog.showModal();
  }

  async function remove(head) {
    const conversation = open.get(head.id);
    if (conversation) conversation.removed = true; // what is generated is not kept
    replies.stop(conversation);
    open.delete(head.id);
    await database.remove(head.id);
    store.set({ heads: await database.heads(), status: "Deleted." });
    if (state.chat.id === head.id) begin();
  }

  function itemOf(head) {
    const menu = h("details.menu", {
      key: `menu ${head.id}`,
      onfocusout: (event) => !menu.contains(event.relatedTarget) && (menu.open = false),
      onkeydown: (event) => event.key === "Escape" && menu.open && ((menu.open = false), event.stopPropagation(), menu.firstChild.focus()),
    }, h("summary.tool", { label: `More about ${head.title}`, title: "More" }, icon("more")), h("div.menu-list", [
      ["Rename", () => rename(head)],
      ["Export", async () => download("nucleate-conversation.json", toDocument([open.get(head.id) ?? await database.load(head.id)]))],
      ["Delete", () => ask(`Delete “${head.title}”?`, "Delete", () => remove(head))],
    ].map(([name, act]) => h("button.menu-item", { onclick: () => { menu.open = false; act(); } }, name))));
    return h("li.chat-item", h("button.chat-link", { onclick: () => load(head.id), "aria-current": state.chat.id === head.id ? "true" : null, title: head.title, key: `chat ${head.id}` }, head.title || "Conversation"), menu);
  }

  function showList() {
    const words = search.value.toLowerCase().split(/\s+/);
    const found = state.heads.filter(({ title }) => words.every((word) => title.toLowerCase().includes(word)));
    search.hidden = state.heads.length < 6;
    keepFocus(list, () => put(list, found.map(itemOf)));
  }

  // the messages
  const thread = h("div.thread", { tabindex: -1 });
  const rows = new Map();
  let [shown, follows] = [null, true];
  const find = (id) => state.chat.nodes[id];
  const card = createTokenCard(thread, root, find, { store, actions: replies });
  const context = { store, actions: replies, persist, setParam: (name, value) => setParams(withValue(settings, state.params, name, value)) };
  const last = h("div.thread-rows");
  put(thread, last);

  function welcome() {
    const { mode } = state.chat;
    const examples = EXAMPLES[model.bundled ? "bundled" : "other"][mode];
    const modes = h("div.segments", { role: "group", label: "Kind of conversation" }, [["chat", "Chat"], ["text", "Continue a text"]].map(([value, name]) =>
      button(name, () => begin(value), "segment", { "aria-pressed": String(mode === value) })));
    return h("div.welcome", h("h2", model.name), h("p.muted", `${integer(model.context_length)} tokens of context`),
      model.chat ? modes : h("p.help", "This model has no chat template: it continues your text."),
      model.bundled && h("p.help", "This small model comes with nucleate and tells children's stories. Start the server with --model for another one."),
      h("ul.examples", { label: "Examples" }, examples.map((text) => h("li", h("button.example", { onclick: () => (send(text), focusField()) }, text)))));
  }

  function showThread() {
    const { chat } = state;
    const path = pathOf(chat);
    const isText = chat.mode === "text";
    if (shown !== chat) rows.clear();
    shown = chat;
    const wanted = path.flatMap((node, i) => {
      if (isText && node.role === "user" && path[i + 1]?.role === "assistant") return [];
      const before = isText && node.role === "assistant" && path[i - 1]?.role === "user" ? path[i - 1] : null;
      const row = rows.get(node.id) ?? createRow(chat, node, context, before);
      rows.set(node.id, row);
      return [row];
    });
    const had = last.contains(document.activeElement);
    keepFocus(last, () => {
      const elements = wanted.length ? wanted.map((row) => row.element) : [welcome()];
      if (elements.length !== last.children.length || elements.some((element, i) => element !== last.children[i])) put(last, elements);
      for (const row of wanted) row.update();
    });
    if (had && !last.contains(document.activeElement)) focusField();
    thread.classList.toggle("nci-text-mode", isText);
    title.textContent = chat.title || "New conversation";
    document.title = chat.title ? `${chat.title} - nucleate` : "nucleate";
    scroll();
  }

  function scroll() {
    if (follows) thread.scrollTop = thread.scrollHeight;
  }
  thread.addEventListener("scroll", () => (follows = thread.scrollTop + thread.clientHeight > thread.scrollHeight - 60), { passive: true });

  // the field
  const field = h("textarea.input.entry", { rows: 1, label: "Message", key: "message", oninput: showField, onkeydown });
  const sendButton = h("button.send", { type: "submit", tip: "Send" }, icon("send"));
  const stopButton = h("button.send.stop", { onclick: () => replies.stop(state.chat), tip: "Stop", hidden: true }, icon("stop"));
  const form = h("form.composer", {
    label: "Message",
    onsubmit(event) {
      event.preventDefault();
      if (!field.value.trim() || replies.nodeOf(state.chat)) return;
      send(field.value);
      field.value = "";
      showField();
    },
  }, field, sendButton, stopButton);

  function focusField() {
    if (HAS_KEYS.matches) field.focus({ preventScroll: true });
  }

  function onkeydown(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && HAS_KEYS.matches) {
      event.preventDefault();
      form.requestSubmit();
    } else if (event.key === "ArrowUp" && !field.value) {
      const edits = thread.querySelectorAll("[aria-label=Edit]");
      if (!edits.length) return;
      event.preventDefault();
      edits[edits.length - 1].click();
    }
  }

  function showField() {
    const generating = replies.nodeOf(state.chat) !== null;
    const empty = !pathOf(state.chat).length;
    field.placeholder = state.chat.mode === "chat" ? `Message to ${model.name}` : empty ? "Text to continue" : "More text, which the model continues";
    sendButton.hidden = generating;
    stopButton.hidden = !generating;
    sendButton.disabled = !field.value.trim();
    if (CSS.supports("field-sizing", "content")) return;
    field.style.setProperty("height", "auto");
    field.style.setProperty("height", `${field.scrollHeight}px`);
  }

  // the frame
  const title = h("h1.chat-title");
  const status = h("p.hidden", { role: "status" });
  const menuButton = iconButton("menu", "Conversations", () => toggle(sidebar, menuButton), { "aria-expanded": String(!sidebar.hidden) });
  const settingsButton = h("button.button.quiet", { onclick: () => toggle(panel, settingsButton), key: "settings", label: "Settings", "aria-expanded": "false" }, icon("settings"), h("span", "Settings"));
  const coloursButton = iconButton("colours", "Colour tokens by their probability", () => {
    store.set({ colours: !state.colours });
    remember();
  }, { "aria-pressed": String(state.colours) });
  const legend = h("ul.colour-legend", { label: "Colours: the probability of a token" }, METRICS.probability.labels.map((text, level) => h("li", h("span.swatch", { class: `level-${level}` }), text)));
  const theme = iconButton("theme", "Light or dark", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    store.set({ theme: root.dataset.theme });
    remember();
  });
  const panel = createPanel(store, session, api, { persist, remember, close: () => toggle(panel, settingsButton) });
  const problem = createProblem(store, session, api, () => store.touch("chat"));

  /** Open or close the list or the settings. */
  function toggle(drawer, opener) {
    drawer.hidden = !drawer.hidden;
    opener.setAttribute("aria-expanded", String(!drawer.hidden));
    if (drawer.hidden) opener.focus();
    else if (!WIDE.matches) drawer.querySelector("button")?.focus();
    scroll();
  }

  root.classList.add("nci-chat-page");
  put(root, sidebar, h("main.chat-main", h("header.chat-head", menuButton, title, h("div.header-buttons", coloursButton, theme, h("div.keys-help", createKeysHelp(KEYS)), settingsButton)), status, problem, legend, thread, h("div.composer-box", form)), panel, card.element);
  addEventListener("keydown", (event) => {
    const { key, ctrlKey, metaKey, shiftKey } = event;
    const control = ctrlKey || metaKey;
    if (control && shiftKey && key.toLowerCase() === "o") begin();
    else if (control && key === ",") toggle(panel, settingsButton);
    else if (key === "Escape" && !root.querySelector("dialog[open]")) {
      if (card.isOpen()) card.hide();
      else if (replies.nodeOf(state.chat)) replies.stop(state.chat);
      else if (!panel.hidden) toggle(panel, settingsButton);
      else if (!sidebar.hidden && !WIDE.matches) toggle(sidebar, menuButton);
      else return;
    } else return;
    event.preventDefault();
  });
  addEventListener("focus", refresh);
  addEventListener("visibilitychange", () => document.hidden && replies.nodeOf(state.chat) && persist(state.chat));
  store.on(["heads", "chat"], showList);
  store.on(["chat", "params", "system"], () => (showThread(), showField()));
  store.onFrame(["reply"], () => {
    const node = replies.nodeOf(state.chat);
    if (node) rows.get(node.id)?.update();
    scroll();
  });
  store.on(["status"], () => (status.textContent = state.status));
  store.on(["colours"], showColours);
  function showColours() {
    legend.hidden = !state.colours;
    thread.classList.toggle("nci-coloured", state.colours);
    coloursButton.setAttribute("aria-pressed", String(state.colours));
  }
  showColours();
  const wanted = location.hash.slice(1);
  begin(defaultMode);
  database.heads().then((heads) => {
    store.set({ heads });
    if (heads.some(({ id }) => id === wanted)) load(wanted);
  });
}

const loading = h("p.help", "Loading …");
put(root, h("main.main", h("h1.brand", "nucleate"), createProblem(store, {}, api, start), loading));
start();
