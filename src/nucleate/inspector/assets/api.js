// Where traces come from: the server (HttpApi) or a saved document (FileApi).

const KEY = "nucleate-inspector-key";

/** An error of the server: status, code and the parameter it concerns. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param });
  }
}

/** Parse JSON; seeds beyond 2^53 become strings, because a number would lose digits. */
export function parseJson(text) {
  return JSON.parse(text.replace(/("(?:first_)?seed"\s*:\s*)(\d{16,})/g, '$1"$2"'));
}

/** The inverse of parseJson. */
export function toJson(value, indent) {
  return JSON.stringify(value, null, indent).replace(/("(?:first_)?seed"\s*:\s*)"(\d+)"/g, "$1$2");
}

export class HttpApi {
  constructor(base) {
    this.base = base;
    this.live = true;
  }

  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  }

  async request(path, body, signal) {
    const headers = {};
    if (body) headers["Content-Type"] = "application/json";
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(`${this.base}${path}`, {
        method: body ? "POST" : "GET",
        headers,
        body: body ? toJson(body) : undefined,
        signal,
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server cannot be reached. Is nucleate serve still running?", { code: "unreachable" });
    }
    if (response.ok) return response;
    const text = await response.text();
    let found = {};
    try {
      found = JSON.parse(text).error ?? {};
    } catch {
      found = { message: text.slice(0, 300) };
    }
    const message = found.message || `HTTP status ${response.status}`;
    throw new ApiError(message, { status: response.status, code: found.code, param: found.param });
  }

  async json(path, body, signal) {
    const response = await this.request(path, body, signal);
    return parseJson(await response.text());
  }

  settings() {
    return this.json("api/settings");
  }

  trace(body, signal) {
    return this.json("api/trace", body, signal);
  }

  draws(body, signal) {
    return this.json("api/draws", body, signal);
  }

  /** The template of a saved page, as text. */
  async template() {
    const response = await this.request("offline.html");
    return response.text();
  }

  /** Generate; calls onEvent with each event. */
  generate(body, onEvent, signal) {
    return this.stream("api/generate", body, onEvent, signal);
  }

  /** Send a request whose answer is a stream of server-sent events; calls onEvent with each of them. */
  async stream(path, body, onEvent, signal) {
    const response = await this.request(path, body, signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5));
        if (data.length && data[0].trim() !== "[DONE]") onEvent(parseJson(data.join("\n")));
      }
    }
  }
}

const NEEDS_MODEL = "This is a saved trace: it has no model to compute this. Open the inspector of a server for that.";

/** A saved document. Only what was saved can be shown. */
export class FileApi {
  constructor(saved) {
    this.saved = saved;
    this.live = false;
  }

  async settings() {
    return this.saved.settings;
  }

  async trace(body) {
    const { run, traces, branches = [] } = this.saved;
    const branch = branches.find((item) => item.start.run === body.run);
    const found = (run.start.run === body.run ? traces : branch?.traces)?.[String(body.step)];
    if (!found) throw new ApiError("The stages of this step were not saved.", { code: "step_not_stored" });
    return found;
  }

  async draws() {
    throw new ApiError(NEEDS_MODEL);
  }

  async generate() {
    throw new ApiError(NEEDS_MODEL);
  }
}

/** Check that a value is a saved document, and return it. Throws an ApiError that says what is wrong. */
export function checkDocument(value) {
  if (value?.format !== "nucleate-trace") throw new ApiError("This file is not a trace saved by the inspector.");
  if (value.version !== 1) throw new ApiError(`This trace has version ${value.version}; this page reads version 1.`);
  const runs = [value.run, ...(value.branches ?? [])];
  if (!value.settings?.stages || !runs.every((run) => run?.start && Array.isArray(run.tokens))) {
    throw new ApiError("This trace is incomplete.");
  }
  return value;
}
