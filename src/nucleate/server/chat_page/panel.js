// The settings: system prompt, presets, the sampling parameters as in the inspector, and tools.
import {button, h, put, uid} from "./dom.js";
import {createControls} from "./controls.js";
import {createField} from "./fields.js";
import {icon, iconButton} from "./icons.js";
import {same, withCompleteOrder, withValue} from "./params.js";

const PRESETS = {
  "Defaults of the model": {},
  "Always the likeliest token": { temperature: 0 },
  "Focused": { temperature: 0.4, top_p: 0.9 },
  "Varied": { temperature: 1, min_p: 0.05, top_p: 1, top_k: 0 },
  "Wild, but no nonsense": { temperature: 1.5, min_p: 0.1, top_p: 1, top_k: 0 },
};
const KEPT = ["seed", "max_tokens", "stop"]; // what a preset leaves as it is
const EXAMPLE_TOOL = [{ type: "function", function: { name: "get_weather", description: "The weather of a city", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];

/** Tools as the API takes them. Throws an Error that says what is wrong. */
export function readTools(text) {
  if (!text.trim()) return [];
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error("This is not JSON.");
  }
  if (!Array.isArray(value)) throw new Error("Tools are a JSON list.");
  const wrong = value.find((tool) => tool?.type !== "function" || typeof tool.function?.name !== "string");
  if (wrong) throw new Error('Each tool has "type": "function" and a "function" with a "name".');
  return value;
}

/** remember(values): called to keep tools and presets; close: hides the panel. */
export function createPanel(store, session, api, { persist, remember, close }) {
  const { state } = store;
  const { model } = state.settings;

  const systemId = uid();
  const system = h("textarea.input", {
    id: systemId, rows: 3, placeholder: "What the model should know, and how it should answer", key: "system",
    oninput() {
      state.chat.system = system.value;
      store.touch("system");
      if (state.chat.leaf) persist(state.chat);
    },
  });
  const systemBox = h("div.section", h("label.subtitle", { for: systemId }, "System prompt"), system);

  const presetId = uid();
  const presets = h("select.select", { id: presetId, key: "preset", onchange: () => choose(presets.value) });
  const removePreset = iconButton("remove", "Delete this preset", () => {
    const { [presets.value]: _, ...others } = state.presets;
    store.set({ presets: others });
    remember();
  });
  const nameId = uid();
  const name = h("input.input", { id: nameId, required: true, maxlength: 60, autocomplete: "off" });
  const dialog = h("dialog.dialog", { label: "Save as a preset" }, h("form.stack", { onsubmit: savePreset }, h("h2.title", "Save as a preset"),
    h("label.label", { for: nameId }, "Name"), name, h("div.tools", h("button.button.primary", { type: "submit" }, "Save"), button("Cancel", () => dialog.close()))));
  const save = button("Save …", () => dialog.showModal(), "small", { tip: "Save these settings as a preset", key: "save preset" });

  const own = (params) => Object.fromEntries(Object.entries(params).filter(([key]) => !KEPT.includes(key)));
  const all = () => ({ ...PRESETS, ...state.presets });
  const isChosen = (values) => same(Object.entries(own(state.params)).sort(), Object.entries(own(withCompleteOrder(state.settings, reduced(values)))).sort());

  /** The values that differ from the defaults. */
  function reduced(values) {
    return Object.entries(values).reduce((made, [key, value]) => withValue(state.settings, made, key, value), {});
  }

  function choose(chosen) {
    const kept = Object.fromEntries(Object.entries(state.params).filter(([key]) => KEPT.includes(key)));
    session.setParams({ ...reduced(all()[chosen]), ...kept });
  }

  function savePreset(event) {
    event.preventDefault();
    dialog.close();
    store.set({ presets: { ...state.presets, [name.value.trim()]: own(state.params) } });
    name.value = "";
    remember();
  }

  function showPresets() {
    const found = Object.entries(all()).find(([, values]) => isChosen(values))?.[0];
    put(presets, Object.keys(all()).map((value) => h("option", { value }, value)), !found && h("option", { value: "", disabled: true }, "Own settings"));
    presets.value = found ?? "";
    removePreset.hidden = !found || found in PRESETS;
    save.hidden = Boolean(found);
  }

  const others = state.settings.parameters.filter((p) => model.reasoning || p.name !== "max_reasoning_tokens")
    .map((p) => createField(state.settings, p, (key, value) => session.setParams(withValue(state.settings, state.params, key, value))));
  const showOthers = () => others.forEach((each) => each.update(state.params, state.problem));
  const othersBox = h("details.section.more", h("summary.subtitle", { key: "more parameters" }, icon("next"), "More parameters"), others.map((each) => each.element));

  const toolsId = uid();
  const wrong = h("p.field-error", { role: "status" });
  const tools = h("textarea.input.mono", { id: toolsId, rows: 3, spellcheck: "false", placeholder: "A JSON list, as in OpenAI's API", key: "tools", value: state.toolsText, oninput: readField });
  const example = button("Insert an example", () => {
    tools.value = JSON.stringify(EXAMPLE_TOOL, null, 1);
    readField();
  }, "small quiet");
  const toolsBox = h("div.section", { hidden: !model.tools }, h("div.card-head", h("label.subtitle", { for: toolsId }, "Tools"), example), tools, wrong,
    h("p.help", "The model may ask for a call of one of these functions. You type what it returns."));
  function readField() {
    try {
      store.set({ tools: readTools(tools.value), toolsText: tools.value });
      wrong.textContent = "";
      remember();
    } catch (error) {
      wrong.textContent = error.message;
    }
  }

  store.on(["params", "problem"], showOthers);
  store.on(["params", "presets"], showPresets);
  store.on(["chat"], () => {
    systemBox.hidden = state.chat.mode === "text";
    if (document.activeElement !== system) system.value = state.chat.system;
  });
  showOthers();
  showPresets();
  return h("aside.drawer.panel-side", { label: "Settings", hidden: true, key: "settings panel" },
    h("div.drawer-head", h("h2.title", "Settings"), iconButton("close", "Close the settings", close)),
    h("div.drawer-body", systemBox, h("div.section", h("label.subtitle", { for: presetId }, "Preset"), h("div.preset", presets, removePreset, save)), createControls(store, session, api, "Sampling"), othersBox, toolsBox), dialog);
}
