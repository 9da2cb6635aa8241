// Where tokens stand: breaks a growing list of tokens into lines of a given width. Knows no document.
import {clamp} from "./dom.js";

/** widthOf(text): the width of a token in pixels. */
export class LineLayout {
  constructor(width, widthOf) {
    Object.assign(this, { width, widthOf, items: [], first: [0], x: 0 }); // first: index of the first item of each line
  }

  get count() {
    return this.first.length;
  }

  /** Append an item {text, breaks: whether a line ends after it}. */
  add(item) {
    const width = this.widthOf(item.text);
    if (this.x > 0 && this.x + width > this.width) this.newLine(this.items.length);
    this.items.push(item);
    this.x += width;
    if (item.breaks) this.newLine(this.items.length);
  }

  newLine(at) {
    this.first.push(at);
    this.x = 0;
  }

  itemsOf(line) {
    return this.items.slice(this.first[line], this.first[line + 1] ?? this.items.length);
  }

  /** The line of an item. */
  lineOf(item) {
    let [low, high] = [0, this.count - 1];
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (this.first[middle] <= item) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** The item some lines below (or above) another one, at about the same place in its line. */
  below(item, lines) {
    const from = this.lineOf(item);
    const to = clamp(from + lines, 0, this.count - 1);
    const end = (this.first[to + 1] ?? this.items.length) - 1;
    return Math.min(this.first[to] + item - this.first[from], Math.max(end, 0));
  }
}
