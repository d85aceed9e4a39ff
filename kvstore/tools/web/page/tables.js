// Tables and boxes that are filled again and again: a cell is touched only when it says something else than before,
// so that nothing flickers, and what somebody has marked to copy stays marked.

import { element } from "./charts.js";
import { printable } from "./units.js";

const ROWS_SHOWN = 10;

/** Say this, if it is not said already. Text is only ever text. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** The same, each figure on one line with its unit. */
export function together(text) {
  return text.replace(/(\d) (?=\S)/g, "$1\u00a0");
}

/** A name that a client chose; `otherwise` where it is empty. */
export function name(text, otherwise) {
  return { kind: "name", text: text === "" ? otherwise : printable(text) };
}

function fill(cell, value) {
  const key = JSON.stringify(value);
  if (cell.said === key) return;
  cell.said = key;
  const { kind = "text", text = String(value), level = "", title } = typeof value === "object" && value ? value : {};
  if (level) cell.dataset.level = level;
  else delete cell.dataset.level;
  cell.classList.toggle("name", kind === "name");
  if (kind === "name") cell.replaceChildren(element("bdi", { title: text }, text));
  else if (kind === "hash") cell.replaceChildren(element("code", { class: "hash", title: text }, text));
  else if (kind === "bar" || kind === "meter") cell.replaceChildren(bar(kind, value.parts));
  else cell.textContent = text;
  if (title) cell.title = title;
}

/** A bar of [share, colour, title]. */
export function bar(kind, parts) {
  const made = element("div", { class: kind });
  for (const [share, colour, title] of parts) {
    const piece = element("i", { class: `c-${colour}`, ...(title ? { title } : {}) });
    piece.style.width = `${(100 * Math.min(1, Math.max(0, share))).toFixed(2)}%`;
    made.append(piece);
  }
  return made;
}

export class Table {
  /**
   * columns: [{title, right, drop, short}]; `drop` ones are left out on narrow screens. empty: said where there are no rows.
   * limit: rows before a button shows the others.
   */
  constructor(place, title, columns, empty, limit = ROWS_SHOWN) {
    Object.assign(this, { columns, empty, limit, all: false });
    this.heading = element("h2", {}, title);
    this.note = element("p", { class: "note" });
    const head = element(
      "tr",
      {},
      ...columns.map((column) => element("th", { class: Table.style(column), scope: "col" }, column.title)),
    );
    this.body = element("tbody");
    this.table = element("table", {}, element("thead", {}, head), this.body);
    this.more = element("button", { type: "button", class: "more" });
    this.more.addEventListener("click", () => {
      this.all = !this.all;
      this.fill(this.rows, this.said);
    });
    place.replaceChildren(this.heading, this.note, this.table, this.more);
  }

  static style({ right, drop, short }) {
    return [right && "right", drop && "drop", short && "short"].filter(Boolean).join(" ");
  }

  /** rows of cells: a text, or {kind: "name" | "hash" | "bar" | "meter", …, level: "warn" | "bad"}. */
  fill(rows, note = "") {
    this.rows = rows;
    this.said = note;
    const shown = this.all ? rows : rows.slice(0, this.limit);
    say(this.note, rows.length ? note : this.empty);
    this.table.hidden = !rows.length;
    this.more.hidden = rows.length <= this.limit;
    say(this.more, this.all ? `show ${this.limit}` : `show all ${rows.length}`);
    while (this.body.rows.length > shown.length) this.body.deleteRow(-1);
    shown.forEach((cells, n) => {
      const row = this.body.rows[n] ?? this._row();
      cells.forEach((value, column) => fill(row.cells[column], value));
    });
  }

  _row() {
    const cell = (column) => element("td", { class: Table.style(column), "data-column": column.title });
    const row = element("tr", {}, ...this.columns.map(cell));
    this.body.append(row);
    return row;
  }
}

/** A box of words and what they stand for; it is not there while there is nothing to say. */
export class Facts {
  constructor(place, title) {
    this.place = place;
    this.list = element("dl");
    place.replaceChildren(element("h2", {}, title), this.list);
    place.hidden = true;
  }

  /** facts: {word: text}, or null. */
  fill(facts) {
    this.place.hidden = !facts;
    const entries = Object.entries(facts ?? {});
    const words = entries.map(([word]) => word).join("\n");
    if (this.words !== words) {
      this.words = words;
      this.list.replaceChildren(...entries.flatMap(([word]) => [element("dt", {}, word), element("dd", {})]));
    }
    entries.forEach(([, text], n) => say(this.list.children[2 * n + 1], text));
  }
}

export class Tile {
  constructor(place, what, metered = false) {
    this.figure = element("p", { class: "figure" }, "–");
    this.means = element("p", { class: "means" });
    this.meter = metered ? bar("meter", [[0, metered]]) : "";
    place.append(
      element("div", { class: "tile" }, element("p", { class: "what" }, what), this.figure, this.meter, this.means),
    );
  }

  fill(figure, means, share = 0) {
    say(this.figure, figure);
    say(this.means, together(means));
    if (this.meter) this.meter.firstChild.style.width = `${(100 * Math.min(1, share)).toFixed(1)}%`;
  }
}
