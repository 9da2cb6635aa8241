// Messages as rows: text, reasoning, tool calls, and what can be done with each.
import {button, fixed, h, integer, plural, put, uid} from "./dom.js";
import {icon, iconButton} from "./icons.js";
import {blocksOf, copyText} from "./markdown.js";
import {levelOf} from "./scales.js";
import {addNode, pathOf, removeNode, showNode, versionsOf} from "./conversations.js";
import {tokenStarts} from "./replies.js";

const ENDS = { null: "stopped", edited: "edited", length: "cut at the maximum length", stopped: "stopped", tool_calls: "waits for a tool" };

/** What to show for parts of a text of a reply: its tokens, so that each can be pointed at. */
function tokenLeaf(node, text, starts) {
  if (!starts) return (start, end) => text.slice(start, end);
  return (start, end) => {
    const made = [];
    let [low, high] = [0, starts.length - 1]; // the first token that ends after start
    while (low < high) {
      const middle = (low + high) >> 1;
      if (starts[middle + 1] > start) high = middle;
      else low = middle + 1;
    }
    let at = start;
    if (starts[low] > start || low >= node.tokens.length) made.push(text.slice(start, (at = Math.min(end, Math.max(start, starts[low] ?? end)))));
    for (let i = low; i < node.tokens.length && at < end; i += 1) {
      const to = Math.min(end, starts[i + 1]);
      if (to <= at) continue;
      const { logprob, chosen } = node.tokens[i];
      made.push(h("span.tok", { "data-step": i, "data-level": levelOf("probability", { model_probability: Math.exp(logprob) }), "data-chosen": chosen }, text.slice(at, to)));
      at = to;
    }
    return at < end ? [...made, text.slice(at, end)] : made;
  };
}

/** Show the blocks of a text in an element; blocks that look the same stay. */
function showBlocks(element, blocks, text, version) {
  element.blocks ??= [];
  const keys = blocks.map(({ start, end }) => `${version} ${start} ${text.slice(start, end)}`);
  const same = keys.findIndex((key, i) => key !== element.blocks[i] || i === blocks.length - 1);
  const first = same < 0 ? keys.length : same;
  while (element.children.length > first) element.lastChild.remove();
  for (const block of blocks.slice(first)) element.append(block.build());
  element.blocks = keys;
}

/** The lines of a text as blocks. */
function linesOf(text, leaf) {
  const starts = [0, ...Array.from(text.matchAll(/\n/g), ({ index }) => index + 1)];
  return starts.map((start, i) => ({ start, end: starts[i + 1] ?? text.length, build: () => h("span", leaf(start, starts[i + 1] ?? text.length)) }));
}

/** A field in place of a message, to change its text. */
function editor(text, label, actions, cancel) {
  const area = h("textarea.input.text", { label, value: text, rows: 3 });
  const [[, act]] = actions;
  const onkeydown = (event) => {
    if (event.key === "Escape") cancel();
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) act(area.value);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const buttons = actions.map(([name, go], i) => button(name, () => go(area.value), i ? "" : "primary"));
  return [h("div.editor", { onkeydown }, area, h("div.tools", buttons, button("Cancel", cancel, "quiet"))), area];
}

/** A row for a message. context: {store, actions, persist, pick}; before: the text that a reply of a text continues. */
export function createRow(conversation, node, context, before = null) {
  const { store, actions, persist } = context;
  const { state } = store;
  const isReply = node.role === "assistant";
  const isText = conversation.mode === "text";
  const name = { user: "You", assistant: "Reply", tool: `Result of ${node.name || "a tool"}` }[node.role];
  const content = h("div.markdown", isReply ? { tabindex: 0, role: "group", label: "Reply: the arrow keys walk through its tokens", "data-node": node.id } : {});
  const [given, continued] = [h("span.given-text"), h("span")];
  if (isText && isReply) put(content, given, continued);
  const thoughts = h("div.thoughts", { "data-node": node.id });
  const thinking = h("span");
  const reasoning = h("details.fold", { hidden: true, key: `reasoning ${node.id}` }, h("summary", icon("next"), thinking), thoughts);
  const [calls, problem, foot, edit] = [h("div.calls"), h("div.reply-problem", { hidden: true }), h("div.foot"), h("div", { hidden: true })];
  const waiting = h("p.waiting", { hidden: true, label: "Waiting for the first token", role: "img" }, h("i"), h("i"), h("i"));
  const body = h("div.body", reasoning, content, waiting, calls, problem);
  const element = h("article.message", { class: `from-${node.role} ${isText ? "of-text" : ""}`, label: name }, body, edit, foot);

  function changed() {
    persist(conversation);
    store.touch("chat");
  }

  /** Change a message: a new version beside the old one. */
  function startEdit(target) {
    const close = () => {
      edit.hidden = true;
      put(edit);
      body.hidden = foot.hidden = false;
      foot.querySelector("[data-key^=Edit]")?.focus();
    };
    const send = (text) => {
      if (!text.trim()) return;
      close();
      actions.reply(conversation, addNode(conversation, target.parent, { ...(target.role === "tool" ? { callId: target.callId, name: target.name } : {}), role: target.role, content: text }).id);
    };
    const save = (text) => {
      close();
      addNode(conversation, target.parent, { role: "assistant", content: text, given: text.length, reasoning: "", calls: [], tokens: [], seed: null, finish: "edited", usage: null, params: {}, own: 0, milliseconds: 0 });
      changed();
    };
    const [form, area] = editor(target.content, `Edit: ${name}`, target.role === "assistant" ? [["Save", save]] : [["Send", send]], close);
    put(edit, form);
    edit.hidden = false;
    body.hidden = foot.hidden = true;
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  /** A button of this message. */
  function tool(picture, tip, onclick, props = {}) {
    return iconButton(picture, tip, onclick, { ...props, key: `${tip} ${node.id}` });
  }

  function versions(target) {
    const all = versionsOf(conversation, target);
    if (all.length < 2) return null;
    const at = all.indexOf(target);
    const to = (by) => () => {
      showNode(conversation, all[at + by].id);
      changed();
    };
    return h("span.versions", tool("back", "Previous version", to(-1), { disabled: at === 0 }), h("span", `${at + 1} / ${all.length}`), tool("next", "Next version", to(1), { disabled: at === all.length - 1 }));
  }

  function facts() {
    const { usage, own, milliseconds, seed, finish, tokens } = node;
    const count = usage?.completion_tokens ?? own ?? tokens.length;
    const end = actions.nodeOf(conversation) === node || node.error ? null : ENDS[finish];
    const used = (usage?.total_tokens ?? 0) / state.settings.model.context_length;
    const reuse = () => {
      context.setParam("seed", seed);
      store.set({ status: `The next replies use seed ${seed}.` });
    };
    return [
      count > 0 && h("span", plural(count, "token")),
      used > 0.5 && h("span", { title: `${integer(usage.total_tokens)} of ${integer(state.settings.model.context_length)} tokens` }, `${Math.round(100 * used)}% of the context`),
      count > 1 && milliseconds > 0 && h("span.speed", { title: "with the time for the prompt" }, `${fixed((1000 * count) / milliseconds, 1)} tokens/s`),
      seed !== null && h("span", "seed ", h("button.seed", { onclick: reuse, key: `seed ${node.id}`, tip: `Use seed ${seed} for the next replies too`, "aria-pressed": String(String(state.params.seed ?? "") === String(seed)) }, String(seed))),
      end && h("span", end),
    ];
  }

  function tools() {
    const generating = actions.nodeOf(conversation) !== null;
    const editable = isText && before ? before : node;
    const copy = tool("copy", "Copy", async () => store.set({ status: await copyText((isText && before?.content || "") + node.content) ? "Copied." : "The browser did not allow copying." }));
    const remove = () => {
      removeNode(conversation, isText && before && versionsOf(conversation, node).length === 1 ? before : node);
      changed();
    };
    return [
      isText && before && versions(before),
      versions(node),
      (node.content || before) && copy,
      tool("edit", isReply && !before ? "Edit the reply" : "Edit", () => startEdit(editable), { disabled: generating }),
      isReply && tool("again", "Generate another version", () => actions.reply(conversation, node.parent), { disabled: generating }),
      isReply && [null, "length", "stopped", "edited"].includes(node.finish) && node.content && tool("go", "Continue this reply", () => actions.goOn(conversation, node), { disabled: generating }),
      tool("remove", "Delete, with all that follows", remove, { disabled: generating }),
    ];
  }

  /** Generate instead of a reply that failed, which stays if it has some text. */
  function again() {
    if (!node.content && !node.reasoning) removeNode(conversation, node);
    actions.reply(conversation, node.parent);
  }

  function callBox(call, i) {
    let shown = call.arguments;
    try {
      shown = JSON.stringify(JSON.parse(shown), null, 2);
    } catch { /* incomplete, as it streams */ }
    const answered = Object.values(conversation.nodes).some((other) => other.parent && other.callId === call.id && pathOf(conversation).includes(other));
    const id = uid();
    const area = h("textarea.input", { id, rows: 2, placeholder: "What the tool returned" });
    const answer = () => {
      const parent = pathOf(conversation).at(-1).id;
      const made = addNode(conversation, parent, { role: "tool", callId: call.id, name: call.name, content: area.value });
      const open = node.calls.filter((other) => other !== call && !pathOf(conversation).some((each) => each.callId === other.id));
      if (open.length) changed();
      else actions.reply(conversation, made.id);
    };
    const running = actions.nodeOf(conversation) !== null;
    return [h("details.fold", { key: `call ${node.id} ${i}` }, h("summary", icon("next"), h("span", "Calls ", h("code", call.name || "…"))), h("pre", { tabindex: 0, role: "region", label: "Arguments" }, shown)),
      !answered && !running && h("div.answer", h("label.label", { for: id }, "Result of ", h("code", call.name)), area, button("Send", answer, "small", { key: `answer ${call.id}` }))];
  }

  /** Show the text of the message. */
  function showText(generating) {
    const starts = isReply ? tokenStarts(node, "content") : null;
    const text = node.content;
    const leaf = tokenLeaf(node, text, starts);
    const version = starts ? starts[0] : "plain";
    if (isText && isReply) {
      given.textContent = before?.content ?? "";
      showBlocks(continued, linesOf(text, leaf), text, version);
    } else if (isReply) showBlocks(content, blocksOf(text, leaf), text, version);
    else content.textContent = text;
    content.hidden = !text && !before;
    waiting.hidden = !generating || Boolean(text || node.reasoning || node.calls?.length);
    if (isReply) {
      reasoning.hidden = !node.reasoning;
      if (node.reasoning) {
        put(thoughts, tokenLeaf(node, node.reasoning, tokenStarts(node, "reasoning"))(0, node.reasoning.length));
        const count = node.usage?.completion_tokens_details?.reasoning_tokens;
        thinking.textContent = generating && !text ? "Reasoning …" : `Reasoning${count ? ` (${integer(count)} tokens)` : ""}`;
      }
      element.setAttribute("aria-busy", String(generating));
    }
  }

  let [drawn, seen] = ["", ""];
  function update() {
    const generating = actions.nodeOf(conversation) === node;
    const look = [generating, node.content.length, node.reasoning?.length, node.tokens?.length, node.calls?.length, before?.content].join();
    if (look !== seen) showText(generating);
    seen = look;
    const mark = JSON.stringify([generating, node.calls, actions.nodeOf(conversation) !== null, node.error, node.finish, state.params.seed, versionsOf(conversation, node).map(({ id }) => id), before && versionsOf(conversation, before).length, conversation.leaf]);
    if (mark === drawn && !generating) return;
    drawn = mark;
    if (isReply) put(calls, node.calls.map(callBox));
    problem.hidden = !node.error;
    if (node.error) put(problem, h("span", node.error), button("Try again", again, "small", { key: `retry ${node.id}` }));
    put(foot, h("div.facts-line", isReply && facts()), !generating && h("div.tools-line", tools()));
  }
  update();
  return { node, element, update };
}
