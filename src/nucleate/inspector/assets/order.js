// The order of the stages: by dragging a stage, or with the buttons beside its name.
import {button, classes, h} from "./dom.js";

/** list: items with data-stage. move(name, target): called to put a stage at the place of another one. */
export function createOrder(list, move) {
  const states = ["drop-before", "drop-after", "dragged"].map(classes);
  let dragged = null; // an item
  const itemAt = (event) => event.target.closest?.("[data-stage]");
  const clear = () => [...list.children].forEach((item) => item.classList.remove(...states));

  list.addEventListener("dragstart", (event) => {
    dragged = itemAt(event);
    event.dataTransfer.setData("text/plain", dragged.dataset.stage);
    event.dataTransfer.setDragImage(dragged, 12, 12);
    dragged.classList.add(states[2]);
  });
  list.addEventListener("dragover", (event) => {
    const item = itemAt(event);
    if (!dragged || !item) return;
    event.preventDefault();
    clear();
    const after = dragged.compareDocumentPosition(item) & Node.DOCUMENT_POSITION_FOLLOWING;
    if (item !== dragged) item.classList.add(states[after ? 1 : 0]);
  });
  list.addEventListener("drop", (event) => {
    const item = itemAt(event);
    if (!dragged || !item) return;
    event.preventDefault();
    if (item !== dragged) move(dragged.dataset.stage, item.dataset.stage);
  });
  list.addEventListener("dragend", () => {
    dragged = null;
    clear();
  });

  /** The grip and the buttons of a stage. names: the stages that can move, in order. */
  return (name, names) => {
    const position = names.indexOf(name);
    const to = (text, by, way) => {
      const target = names[position + by]; // aria-disabled, because a disabled button would lose the focus
      return button(text, () => target && move(name, target), "icon", { tip: `Move ${name} ${way}`, key: `${way} ${name}`, "aria-disabled": String(!target) });
    };
    return [h("span.grip", { draggable: "true", title: `Drag to move ${name}`, "aria-hidden": "true" }, "⠿"), [to("↑", -1, "up"), to("↓", 1, "down")]];
  };
}
