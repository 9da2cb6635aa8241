// Conversations: trees of messages, kept in the browser's database; their file format.
//
// A conversation is {id, title, mode, system, created, updated, nodes, leaf}. mode: "chat", or "text" for a model that
// continues a text. nodes: by id, {id, parent, role, content, ...}; leaf: the id of the last message that is shown.

const FORMAT = "nucleate-conversations";
const ROLES = ["user", "assistant", "tool"];

/** A random id; crypto.randomUUID is missing on pages without TLS. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation(mode, system = "") {
  const now = Date.now();
  return { id: newId(), title: "", mode, system, created: now, updated: now, nodes: {}, leaf: null };
}

/** The shown messages, from the first to the last. leaf: the last one of another branch. */
export function pathOf(conversation, leaf = conversation.leaf) {
  const path = [];
  for (let node = conversation.nodes[leaf]; node; node = conversation.nodes[node.parent]) path.unshift(node);
  return path;
}

function childrenOf(conversation, id) {
  return Object.values(conversation.nodes).filter((node) => node.parent === id).sort((a, b) => a.created - b.created);
}

/** The versions of a message: those after the same one, in the order in which they were made. */
export function versionsOf(conversation, node) {
  return childrenOf(conversation, node.parent);
}

/** Add a message after another one, and show it. */
export function addNode(conversation, parent, node) {
  const siblings = childrenOf(conversation, parent);
  const created = Math.max(Date.now(), ...siblings.map((other) => other.created + 1));
  const made = { id: newId(), parent, created, content: "", ...node };
  conversation.nodes[made.id] = made;
  conversation.leaf = made.id;
  if (!conversation.title && made.role === "user") conversation.title = titleOf(made.content);
  return made;
}

/** Show the branch of a message, down to the latest message of it. */
export function showNode(conversation, id) {
  let last = id;
  for (let next = childrenOf(conversation, last).at(-1); next; next = childrenOf(conversation, last).at(-1)) last = next.id;
  conversation.leaf = last;
}

/** Remove a message with all that follow it, and show the version before it, or what it followed. */
export function removeNode(conversation, node) {
  const versions = versionsOf(conversation, node);
  const at = versions.indexOf(node);
  const remove = (id) => {
    for (const child of childrenOf(conversation, id)) remove(child.id);
    delete conversation.nodes[id];
  };
  remove(node.id);
  const other = versions[at - 1] ?? versions[at + 1];
  if (other) showNode(conversation, other.id);
  else conversation.leaf = node.parent;
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line || "Conversation";
}

/** What the list shows of a conversation. */
export function headOf({ id, title, updated }) {
  return { id, title, updated };
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Conversations in IndexedDB; in memory only, where a browser has none. heads() are those of all, latest first. */
export async function openDatabase() {
  const latest = (heads) => heads.sort((a, b) => b.updated - a.updated);
  try {
    const opening = indexedDB.open("nucleate-chat", 1);
    opening.onupgradeneeded = () => ["heads", "conversations"].forEach((name) => opening.result.createObjectStore(name, { keyPath: "id" }));
    const database = await done(opening);
    const stores = (mode) => {
      const transaction = database.transaction(["heads", "conversations"], mode);
      return [transaction.objectStore("heads"), transaction.objectStore("conversations")];
    };
    return {
      kept: true,
      heads: async () => latest(await done(stores("readonly")[0].getAll())),
      load: (id) => done(stores("readonly")[1].get(id)),
      all: () => done(stores("readonly")[1].getAll()),
      async save(conversation) {
        const [heads, conversations] = stores("readwrite");
        heads.put(headOf(conversation));
        await done(conversations.put(conversation));
      },
      async remove(id) {
        const [heads, conversations] = stores("readwrite");
        heads.delete(id);
        await done(conversations.delete(id));
      },
    };
  } catch {
    const map = new Map();
    return {
      kept: false,
      heads: async () => latest([...map.values()].map(headOf)),
      load: async (id) => map.get(id),
      all: async () => [...map.values()],
      save: async (conversation) => void map.set(conversation.id, conversation),
      remove: async (id) => void map.delete(id),
    };
  }
}

/** The document that is saved to a file. */
export function toDocument(conversations) {
  return { format: FORMAT, version: 1, created: new Date().toISOString(), conversations };
}

const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : 0);
const list = (value) => (Array.isArray(value) ? value : []);

function readToken(value) {
  const made = { text: text(value?.text), logprob: Math.min(0, number(value?.logprob)), id: value?.id ?? null, rank: value?.rank ?? null };
  made.top = list(value?.top).map((other) => ({ text: text(other?.text), logprob: Math.min(0, number(other?.logprob)), id: other?.id ?? null }));
  if (value?.chosen) made.chosen = true;
  return value?.bytes ? { ...made, bytes: list(value.bytes).map(number) } : made;
}

function readNode(value, id, nodes) {
  if (!ROLES.includes(value?.role) || typeof value.content !== "string") throw new Error("A message of this file has no role or no text.");
  const { parent, created, seed, finish, usage, params, given, own, promptIds, plain, system, milliseconds, callId, name } = value;
  const made = { id, parent: Object.hasOwn(nodes, parent ?? "") ? parent : null, created: number(created), role: value.role, content: value.content };
  if (value.role === "tool") return { ...made, callId: text(callId), name: text(name) };
  if (value.role === "user") return made;
  const calls = list(value.calls).map((call) => ({ id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments) }));
  return {
    ...made, calls, reasoning: text(value.reasoning), tokens: list(value.tokens).map(readToken), seed: seed ?? null, finish: text(finish) || null,
    usage: usage ?? null, params: { ...params }, given: number(given), own: number(own), system: text(system), promptIds: list(promptIds).map(number), plain: plain === true, milliseconds: number(milliseconds),
  };
}

/** The conversations of a saved document, checked. Throws an Error that says what is wrong. */
export function fromDocument(value) {
  if (value?.format !== FORMAT) throw new Error("This file has no conversations saved by this page.");
  if (value.version !== 1) throw new Error(`This file has version ${value.version}; this page reads version 1.`);
  return list(value.conversations).map((each) => {
    const nodes = Object.fromEntries(Object.entries(each?.nodes ?? {}).map(([id, node]) => [id, readNode(node, id, each.nodes)]));
    const made = { id: text(each.id) || newId(), title: text(each.title), mode: each.mode === "text" ? "text" : "chat", system: text(each.system), created: number(each.created), updated: number(each.updated), nodes, leaf: Object.hasOwn(nodes, each.leaf ?? "") ? each.leaf : null };
    for (const id of Object.keys(nodes)) checkPath(nodes, id);
    return made;
  });
}

/** Throws if the messages before one lead in a circle. */
function checkPath(nodes, id) {
  const seen = new Set();
  for (let at = id; at !== null; at = nodes[at].parent) {
    if (seen.has(at)) throw new Error("The messages of this file lead in a circle.");
    seen.add(at);
  }
}
