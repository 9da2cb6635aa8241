// Form fields for the parameters: a slider with a number, a switch, a choice or a text, each with its help.
import {button, clamp, h, uid} from "./dom.js";
import {baseValue, same, valueOf} from "./params.js";

/** A slider as numbers: [the value at a position, the position of a value]. A logarithmic one has positions 0 to 1000. */
function mapping({ min, max, step, log }) {
  if (!log) return [Number, (x) => clamp(x, min, max)];
  const shift = min > 0 ? 0 : 1 - min;
  const [low, high] = [Math.log(min + shift), Math.log(max + shift)];
  const valueAt = (position) => clamp(Math.round((Math.exp(low + ((high - low) * position) / 1000) - shift) / step) * step, min, max);
  return [valueAt, (x) => (1000 * (Math.log(clamp(x, min, max) + shift) - low)) / (high - low)];
}

function numberField(p, props, set) {
  const input = h("input.input.number-input", {
    ...props, type: "number", step: "any", placeholder: p.optional && "none", min: p.open_low ? null : p.low, max: p.high,
    oninput() {
      if (input.checkValidity() && (input.value !== "" || p.optional)) set(input.value === "" ? null : Number(input.value));
    },
  });
  const showNumber = (value) => {
    if (document.activeElement !== input || Number(input.value) !== value) input.value = value ?? "";
  };
  const { slider } = p;
  if (!slider) return { first: input, show: showNumber };
  const [valueAt, positionOf] = mapping(slider);
  const [min, max, step] = slider.log ? [0, 1000, 1] : [slider.min, slider.max, slider.step];
  const range = h("input.range", {
    type: "range", label: p.name, "aria-describedby": props["aria-describedby"], key: `range ${p.name}`, min, max, step,
    oninput() {
      const x = valueAt(Number(range.value));
      set(Number((p.open_low && x <= p.low ? p.low + slider.step : x).toPrecision(10)));
    },
  });
  return {
    first: input,
    second: range,
    show(value) {
      showNumber(value);
      const position = positionOf(value ?? slider.min);
      if (document.activeElement !== range || valueAt(Number(range.value)) !== value) range.value = position;
      range.style.setProperty("--part", `${(100 * (range.value - min)) / (max - min || 1)}%`);
      range.setAttribute("aria-valuetext", value ?? "none");
    },
  };
}

function switchField(p, props, set) {
  const input = h("input.switch", { ...props, type: "checkbox", onchange: () => set(input.checked) });
  return { first: input, show: (value) => (input.checked = Boolean(value)) };
}

function choiceField(p, props, set) {
  const input = h("select.select", { ...props, onchange: () => set(input.value) }, p.choices.map((value) => h("option", { value }, value)));
  return { first: input, show: (value) => (input.value = value ?? "") };
}

/** A value that is edited as JSON; text without quotes is taken as text where that is allowed. */
function jsonField(p, props, set, complain) {
  const placeholder = p.kind === "StructuredOutputs" ? '{"choice": ["yes", "no"]}' : p.kind.startsWith("Mapping") ? '{"198": -5}' : p.kind.includes("str") ? '["text", …]' : "[198, …]";
  const read = (text) => {
    if (text === "") return set(p.default);
    try {
      return set(JSON.parse(text));
    } catch {
      if (!p.kind.includes("str")) return complain(`${p.name} must be JSON: ${p.allowed}`);
      return set(p.kind.startsWith("str") ? text : [text]);
    }
  };
  const input = h("input.input", { ...props, type: "text", spellcheck: "false", placeholder, onchange: () => read(input.value.trim()) });
  const show = (value) => {
    if (document.activeElement !== input) input.value = same(value, p.default) ? "" : JSON.stringify(value);
  };
  return { second: input, show };
}

/** A field for a parameter: {element, update(params, problem)}. change(name, value) is called with each new value. */
export function createField(settings, p, change) {
  const [id, help] = [uid(), uid()];
  const error = h("span.field-error");
  const set = (value) => change(p.name, value);
  const kinds = { bool: switchField, float: numberField, int: numberField };
  const build = p.choices.length ? choiceField : (kinds[p.kind] ?? jsonField);
  const { first, second, show } = build(p, { id, "aria-describedby": help, key: p.name }, set, (message) => (error.textContent = message));
  const reset = button("↺", () => set(baseValue(settings, p.name)), "icon", { tip: `Reset ${p.name} to the default`, key: `reset ${p.name}` });
  const origin = settings.origins?.[p.name] ? ` Default of this model: ${JSON.stringify(settings.defaults[p.name])}.` : "";
  return {
    element: h("div.field", h("div.field-head", h("label.field-name", { for: id, title: p.allowed }, p.name), reset, first), second,
      h("p.help", { id: help }, `${p.help}.${origin} `, error)),
    update(params, problem) {
      const value = valueOf(settings, params, p.name);
      show(value);
      reset.style.setProperty("visibility", same(value, baseValue(settings, p.name)) ? "hidden" : "visible");
      error.textContent = problem?.param === p.name ? problem.message : "";
    },
  };
}
