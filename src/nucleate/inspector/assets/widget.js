// The entry of the notebook widget: the messages of anywidget in place of HTTP.
import {ApiError, parseJson, toJson} from "./api.js";
import {mount} from "./inspector.js";

/** Asks the kernel of a notebook. model: that of anywidget, which every view of the widget shares. */
class WidgetApi {
  constructor(model, settings) {
    this.model = model;
    this.known = settings;
    this.live = true;
    this.view = Math.random().toString(36).slice(2);
    this.sent = 0;
    this.waiting = new Map(); // id -> {onEvent, resolve, reject}
    this.listener = (message) => this.receive(message);
    model.on("msg:custom", this.listener);
  }

  close() {
    this.model.off("msg:custom", this.listener);
    for (const { reject } of this.waiting.values()) reject(abortError());
    this.waiting.clear();
  }

  ask(path, body, onEvent, signal) {
    return new Promise((resolve, reject) => {
      if (signal?.aborted) {
        reject(abortError());
        return;
      }
      this.sent += 1;
      const id = `${this.view}-${this.sent}`;
      this.waiting.set(id, { onEvent, resolve, reject });
      signal?.addEventListener("abort", () => {
        if (this.waiting.delete(id)) reject(abortError());
      });
      this.model.send({ id, path, body: toJson(body ?? null) });
    });
  }

  receive({ id, event, result, error }) {
    const found = this.waiting.get(id);
    if (!found) return; // of another view, or no longer of interest
    if (event !== undefined) {
      found.onEvent(parseJson(event));
      return;
    }
    this.waiting.delete(id);
    if (error) found.reject(new ApiError(error.message, { status: 0, code: error.code, param: error.param }));
    else found.resolve(parseJson(result));
  }

  async settings() {
    return this.known;
  }

  generate(body, onEvent, signal) {
    return this.ask("generate", body, onEvent, signal);
  }

  trace(body, signal) {
    return this.ask("trace", body, null, signal);
  }

  draws(body, signal) {
    return this.ask("draws", body, null, signal);
  }

  template() {
    return this.ask("template");
  }
}

function abortError() {
  return new DOMException("The request was aborted.", "AbortError");
}

/** Show the widget, as anywidget asks for it. Returns what to do when the view is removed. */
export function render({ model, el }) {
  const saved = parseJson(model.get("document"));
  const api = new WidgetApi(model, saved.settings);
  mount(el, api, { document: saved, shareable: false });
  return () => api.close();
}
