// The settings: the request, the active stages in their order, and stages to add.
import {button, choice, h, keepFocus, put, scroller, uid} from "./dom.js";
import {createField} from "./fields.js";
import {createOrder} from "./order.js";
import {complete, orderOf, sameParams, sharedNames, shownStages, valueOf, withMoved, withoutStage, withValue} from "./params.js";
import {createRequestFields} from "./request.js";
import {currentRun} from "./state.js";

/** session: what it has besides setParams may be missing; without generate, there is no button for it. */
export function createControls(store, session, api, title = "Settings") {
  const { state } = store;
  const { settings } = state;
  const pinned = new Set(["temperature"]); // stages that are listed although they are neutral
  const shared = sharedNames(settings);
  const read = () => (state.editing === "B" && state.paramsB ? state.paramsB : state.params);
  const change = (name, value) => session.setParams(withValue(settings, read(), name, value));
  const fields = new Map(); // name of a parameter -> field
  let listed = []; // the stages that have a card

  function fieldOf(p) {
    if (!fields.has(p.name)) fields.set(p.name, createField(settings, p, change));
    return fields.get(p.name).element;
  }

  const list = h("ol.stages", { label: "Active stages, in order" });
  const movable = () => listed.filter((stage) => stage.shape !== "combine").map((stage) => stage.name);
  const handles = createOrder(list, (name, target) => session.setParams(withMoved(settings, read(), movable(), name, target)));

  function removeStage(stage) {
    pinned.delete(stage.name);
    session.setParams(withoutStage(settings, read(), stage));
    show();
    filter.focus();
  }

  function addStage(stage) {
    pinned.add(stage.name);
    show();
    const card = [...list.children].find((item) => item.dataset.stage === stage.name);
    card.scrollIntoView({ block: "nearest" });
    card.querySelector("input, select")?.focus();
  }

  function cardOf(stage) {
    const [grip, moves] = stage.shape === "combine" ? [] : handles(stage.name, movable());
    return h("li.stage-card", { "data-stage": stage.name },
      h("div.stage-head", grip, h("h4.stage-title", { title: stage.help }, stage.name), h("span.shape", stage.shape), moves,
        button("×", () => removeStage(stage), "icon", { tip: `Remove ${stage.name}` })),
      stage.parameters.filter((p) => !shared.has(p.name)).map(fieldOf));
  }

  const [presetBox, preset] = choice("Order", [...Object.keys(settings.orders), "custom"], (name) => change("order", name));
  preset.lastChild.disabled = true;
  const [orderError, sharedBox, add] = [h("p.field-error"), h("div.stage-card"), h("ul")];
  const filter = h("input.input", { type: "search", placeholder: "Filter stages and parameters", label: "Filter stages and parameters", key: "filter", oninput: showAdd });

  function showAdd() {
    const words = filter.value.toLowerCase().split(/\s+/);
    const fits = ({ name, help, parameters }) => {
      const text = [name, help, ...parameters.flatMap((p) => [p.name, p.help])].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    };
    [...list.children].forEach((item, i) => (item.hidden = !fits(listed[i])));
    const rest = settings.stages.filter((stage) => !listed.includes(stage) && fits(stage));
    put(add, rest.map((stage) => h("li", h("button.add", { onclick: () => addStage(stage) }, h("span.field-name", stage.name), h("span.help", stage.help)))),
      !rest.length && h("li.help", "No other stage fits the filter."));
  }

  const request = createRequestFields(settings, change, read, store);
  const which = h("div.segments", { role: "group", label: "Settings to edit" }, ["A", "B"].map((editing) => button(editing, () => store.set({ editing }), "segment")));
  const differs = h("p.help", { "aria-live": "polite" });
  const go = button("Generate with these settings", () => {
    const run = currentRun(state);
    session.generate({ input: run.input, parent: run.parent, params: complete(read(), run) }, { step: state.step });
  }, "primary");
  const resetAll = button("Reset all", () => {
    const { seed = null, max_tokens = null } = read();
    session.setParams({ seed, max_tokens });
  }, "small");

  const id = uid();
  const fieldset = h("fieldset", { "aria-labelledby": id },
    h("div.card-head", h("h2.title", { id }, title), which, resetAll), request.element,
    h("div.card-head.order", h("h3.subtitle", "Stages"), presetBox), orderError, filter, list, sharedBox,
    api.live && h("h3.subtitle", "Add a stage"), api.live && Object.assign(scroller("Stages to add", add), { className: "nci-scroll nci-add-box" }));
  const box = h("section.card.controls", { "aria-labelledby": id, tabindex: api.live ? null : 0 }, fieldset, session.generate && h("div.go", go, differs));

  function showCards(stages) {
    listed = stages;
    const common = settings.stages.flatMap((stage) => (stages.includes(stage) ? stage.parameters : [])).filter((p) => shared.has(p.name));
    const unique = common.filter((p, i) => common.findIndex((other) => other.name === p.name) === i);
    keepFocus(box, () => {
      put(list, stages.map(cardOf));
      sharedBox.hidden = !unique.length;
      put(sharedBox, h("h4.stage-title", "Shared by several stages"), unique.map(fieldOf));
      showAdd();
    });
  }

  function show() {
    const { problem, paramsB, generating } = state;
    const [params, run] = [read(), currentRun(state)];
    const stages = shownStages(settings, params, pinned);
    if (stages.length !== listed.length || stages.some((stage, i) => stage !== listed[i])) showCards(stages);
    const order = valueOf(settings, params, "order");
    preset.value = Array.isArray(order) ? "custom" : order;
    preset.title = orderOf(settings, params).join(" → ");
    orderError.textContent = problem?.param === "order" ? problem.message : "";
    for (const field of fields.values()) field.update(params, problem);
    request.update(params, problem);
    which.hidden = !paramsB;
    for (const item of which.children) item.setAttribute("aria-pressed", String(item.textContent === state.editing));
    fieldset.disabled = !api.live;
    go.disabled = !api.live || generating || !run?.input;
    const changed = run && !sameParams(complete(params, run), run.params);
    differs.textContent = !api.live ? "A saved trace has no model: its settings can be read but not changed." : changed ? "The output was generated with other settings." : "";
  }
  store.on(["params", "paramsB", "editing", "problem", "generating", "run"], show);
  show();
  return box;
}
