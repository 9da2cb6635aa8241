// Which tokens were held back because they might belong to a stop string, released later, or cut.

/** The bookkeeping of a run whose tokens arrive one after the other. */
export function newTextMarks() {
  return { queue: [], marks: [] };
}

/** Take the next token. Its mark is null, or {held: true, releasedAt: step | null, cut: boolean}. */
export function takeToken(book, token) {
  const { queue, marks } = book;
  marks.push(null);
  if (token.text !== "") queue.push({ step: token.step, text: token.text });
  let rest = token.released;
  while (rest !== "" && queue.length) {
    const [first] = queue;
    const length = Math.min(rest.length, first.text.length);
    if (rest.slice(0, length) !== first.text.slice(0, length)) {
      queue.length = 0; // bytes that became a character: the texts of the tokens do not add up
      break;
    }
    rest = rest.slice(length);
    first.text = first.text.slice(length);
    if (first.text === "") release(marks, queue.shift().step, token.step);
  }
  if (queue.length && queue[queue.length - 1].step === token.step) {
    marks[token.step] = { held: true, releasedAt: null, cut: false };
  }
}

function release(marks, step, at) {
  if (marks[step]) marks[step].releasedAt = at;
}

/** The output ended: what was not released is not part of the text. */
export function endText(book) {
  for (const { step } of book.queue) book.marks[step] = { held: false, releasedAt: null, cut: true };
  book.queue.length = 0;
}

/** The text of a run: what was released. */
export function textOf(run) {
  return run.end?.text ?? run.tokens.map((t) => t.released).join("");
}

/** What is special about a token, in words. */
export function remarks(run, t) {
  const mark = run.book.marks[t.step];
  const found = [];
  if (t.origin === "given") found.push("given: part of the text that this branch continues");
  if (t.origin === "forced") found.push("forced: the only token that the grammar allowed");
  if (t.origin === "draft") found.push("accepted draft token (speculative decoding)");
  if (t.rejected?.length) found.push(`rejected draft tokens: ${t.rejected.map((r) => JSON.stringify(r.text)).join(", ")}`);
  if (mark?.cut) found.push(cutReason(run, t));
  else if (mark?.held && mark.releasedAt !== null) {
    found.push(`held back until step ${mark.releasedAt}: it could have been the beginning of a stop string`);
  } else if (mark?.held) found.push("held back: it may be the beginning of a stop string or an incomplete character");
  return found;
}

function cutReason(run, t) {
  const reason = run.end?.stop_reason;
  if (typeof reason === "string") return `cut: part of the stop string ${JSON.stringify(reason)}`;
  const last = t.step === run.tokens.length - 1 && run.end?.finish_reason === "stop";
  return last ? "ends the output; not part of the text" : "not part of the text";
}
