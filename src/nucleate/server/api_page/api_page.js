// Renders the OpenAPI document of the server. Texts are set as text, never as HTML.

import { fieldRows } from "./schema_text.js";

const byId = (id) => document.getElementById(id);
let api; // the OpenAPI document

/** An element with properties and children (elements or texts). */
function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** Paragraphs and lists; text between backticks is code. */
function prose(text) {
  return text.trim().split(/\n\n+/).map((block) => {
    if (!block.startsWith("- ")) return element("p", {}, ...inline(block));
    const items = block.split(/\n(?=- )/).map((item) => element("li", {}, ...inline(item.slice(2))));
    return element("ul", {}, ...items);
  });
}

function inline(text) {
  return text.split("`").map((part, index) => (index % 2 ? element("code", {}, part) : part));
}

function resolve(schema) {
  return schema?.$ref ? schema.$ref.slice(2).split("/").reduce((value, name) => value[name], api) : schema;
}

/** A command that sends the required fields to an endpoint. */
function curl(method, path, schema, needsKey) {
  const examples = {
    prompt: "Once upon a time", messages: [{ role: "user", content: "Hello" }], tokens: [1, 2, 3],
  };
  const required = schema && (schema.required?.length ? schema.required : ["prompt"]);
  const body = required && Object.fromEntries(required.map((name) => [name, examples[name] ?? "..."]));
  const server = new URL(".", document.baseURI).href.replace(/\/$/, "");
  return [
    `curl ${server}${path}`,
    needsKey && "-H \"Authorization: Bearer $API_KEY\"",
    body && "-H 'Content-Type: application/json'",
    body && `-d '${JSON.stringify(body)}'`,
  ].filter(Boolean).join(" \\\n  ");
}

function fields(schema, where) {
  const body = element("tbody");
  const filter = element("input", { type: "search", className: "filter", placeholder: "Filter fields" });
  filter.setAttribute("aria-label", `Filter the fields of ${where}`);
  for (const row of fieldRows(schema)) {
    const cells = [element("td", {}, row.name), element("td", {}, row.type), element("td", {}, ...inline(row.about))];
    body.append(element("tr", {}, ...cells));
  }
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  const head = ["Field", "Value", "Description"].map((name) => element("th", { scope: "col" }, name));
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...head)), body);
  return body.rows.length > 10 ? [filter, table] : [table];
}

function operation(method, path, described) {
  const schema = resolve(described.requestBody?.content["application/json"]?.schema);
  const needsKey = Boolean(api.security) && !(described.security?.length === 0);
  const title = element(
    "summary", {},
    element("h2", {}, element("span", { className: "method" }, method.toUpperCase()), " ",
      element("span", { className: "path" }, path)),
    " ",
    element("span", { className: "soft" }, described.summary + (api.security && !needsKey ? " (needs no API key)" : "")),
  );
  const made = element("details", { id: `${method}${path}` }, title);
  made.append(element("h3", {}, "Example"), element("pre", {}, curl(method, path, schema, needsKey)));
  if (schema) made.append(element("h3", {}, "Request fields"), ...fields(schema, path));
  const responses = Object.entries(described.responses).map(([status, response]) =>
    element("li", {}, element("code", {}, status), ` ${resolve(response).description}`));
  made.append(element("h3", {}, "Responses"), element("ul", {}, ...responses));
  return made;
}

function show(found) {
  api = found;
  byId("version").textContent = `Version ${api.info.version}`;
  byId("about").replaceChildren(...prose(api.info.description));
  const operations = Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, described]) => operation(method, path, described)));
  byId("operations").replaceChildren(...operations);
  const linked = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (linked) {
    linked.open = true;
    linked.scrollIntoView();
  }
}

async function load(key) {
  const status = byId("status");
  try {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await fetch("openapi.json", { headers });
    byId("key").hidden = response.status !== 401;
    if (response.status === 401) {
      status.textContent = key ? "The server did not accept this API key." : "";
      byId("key-value").focus();
      return;
    }
    if (!response.ok) throw new Error(`status ${response.status}`);
    show(await response.json());
    status.textContent = "";
  } catch (error) {
    status.textContent = `The API could not be loaded: ${error.message}`;
  }
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  load(byId("key-value").value.trim());
});
load();
