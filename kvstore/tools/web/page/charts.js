// Plots of the live page and of reports, drawn as SVG at the width that is there. Of those over time the newest column
// always ends at the right edge.
//
//   y │    ▂ █        stacked: layers that add up. lines: figures of their own, "log" where they span decades.
//     │ ▂▒▒█ █ ▂      ▒ nobody was there to count (the daemon was down). Pointing at a column, or the arrow keys,
//     └─────────── t  show its values in the legends of all plots; else they are those of the newest column.

import { NOTHING, clock, day } from "./units.js";

const SVG = "http://www.w3.org/2000/svg";
const TOP = 8,
  RIGHT = 6,
  BOTTOM = 22,
  LEFT = 76;
const HOUR_S = 3600,
  DAY_S = 24 * HOUR_S;
const TICKS_S = [
  ...[60, 120, 300, 600, 900, 1800, HOUR_S, 2 * HOUR_S, 4 * HOUR_S, 6 * HOUR_S, 12 * HOUR_S],
  ...[DAY_S, 2 * DAY_S, 7 * DAY_S, 14 * DAY_S],
];
const TICKS_S_MAX = 28 * DAY_S;
const BAR_WIDTH = 10, // columns that are wider stand apart
  BAR_WIDTH_MAX = 46;
const TICK_APART = 40; // pixels between places that are not times

/** An element of HTML or SVG. Text is only ever text: names come from clients. */
export function element(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "rect", "text", "circle", "defs", "pattern"].includes(name);
  const made = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** The column that is pointed at in any plot, for all of them. */
export class Cursor {
  constructor() {
    this.column = null;
    this.charts = [];
  }

  move(column) {
    if (column === this.column) return;
    this.column = column;
    for (const chart of this.charts) chart.point();
  }
}

/** From 0 up to at least `high`, in round steps; `binary` for bytes. */
export function steps(high, binary = false) {
  if (!(high > 0)) return [0, 1];
  const base = binary ? 2 : 10;
  const rough = high / 4;
  let step = base ** Math.floor(Math.log(rough) / Math.log(base));
  if (binary) step = rough > step ? step * 2 : step;
  else step *= [1, 2, 5, 10].find((factor) => factor * step >= rough * 0.999);
  return Array.from({ length: Math.ceil(high / step - 1e-9) + 1 }, (_, n) => n * step);
}

/** Powers of ten around these values: two decades at least, from 1 µs on. */
export function decades(low, high) {
  if (!(high > 0)) return [1e-4, 1e-3, 1e-2];
  let first = Math.max(-6, Math.floor(Math.log10(low))),
    last = Math.max(-4, Math.ceil(Math.log10(high)));
  if (last - first < 2) first = last - 2;
  return Array.from({ length: last - first + 1 }, (_, n) => 10 ** (first + n));
}

export class Chart {
  /** place: a <figure>. kind: "stacked" or "lines". scale: "linear", "bytes", "share" or "log". text: of a value. */
  constructor(place, cursor, { title, unit, kind, scale, text, empty, height = 190 }) {
    Object.assign(this, { cursor, title, kind, scale, text, height, empty });
    this.place = place;
    this.at = element("span", { class: "at" });
    this.svg = element("svg", { height, tabindex: "0", role: "img", "aria-label": title });
    this.nothing = element("p", { class: "nothing" }, empty);
    this.legend = element("ul", { class: "legend" });
    const plot = element("div", { class: "plot" }, this.svg, this.nothing);
    plot.style.height = `${height}px`;
    const head = element("figcaption", {}, element("h2", {}, title), this.at);
    place.replaceChildren(head, element("p", { class: "unit" }, unit), plot, this.legend);
    this.rows = new Map();
    cursor.charts.push(this);
    this._listen();
  }

  /**
   * grid: {begin, step, columns, covered: [bool]} of a time; {places: [[x from 0 to 1, name]], columns, covered} of
   * anything else. idle: said where nothing is pointed at; the legend has `whole` of each series then.
   * series: [{name, colour, values, dash, meaning, whole}].
   */
  draw(grid, series) {
    Object.assign(this, { grid, series });
    this.width = Math.max(200, Math.floor(this.svg.parentElement.clientWidth));
    const drawn = series.some(({ values }) => values.some((value) => value !== null && value > 0));
    this.nothing.hidden = drawn || (this.kind === "lines" && series.some((one) => one.values.some((v) => v !== null)));
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`); // paper may be narrower
    this._scale();
    this.svg.replaceChildren(...this._axes(), ...this._gaps(), ...this._marks());
    this.hair = element("line", { class: "hair", y1: TOP, y2: this.height - BOTTOM, visibility: "hidden" });
    this.svg.append(this.hair);
    this._legend();
    this.point();
  }

  /** Show the values of the column that is pointed at, or of the newest one. */
  point() {
    if (!this.grid) return;
    const chosen = this.cursor.column;
    const column = chosen ?? this._newest();
    const { idle } = this.grid;
    this.at.textContent = chosen === null ? (idle ?? "now") : this.called(column);
    const x = this._middle(column);
    this.hair.setAttribute("visibility", chosen === null ? "hidden" : "visible");
    this.hair.setAttribute("x1", x);
    this.hair.setAttribute("x2", x);
    const said = [];
    for (const { name, values, whole } of this.series) {
      const value = (chosen === null && idle !== undefined ? whole : values[column]) ?? null;
      const shown = value !== null ? this.text(value) : chosen === null && idle !== undefined ? "" : NOTHING;
      this.rows.get(name).value.textContent = shown;
      said.push(`${name} ${shown}`);
    }
    this.svg.setAttribute("aria-label", `${this.title}: ${this.at.textContent}: ${said.join(", ")}`);
  }

  /** When a column begins, or what it is of. */
  called(column) {
    const { begin, step, places } = this.grid;
    if (places) return places[column][1];
    const from = begin + column * step;
    return `${step >= HOUR_S ? `${day(from)} ` : ""}${clock(from, step < 60)} UTC`;
  }

  // -- helpers --

  /** The last column that has values: the very last one may have begun just now. */
  _newest() {
    const last = this.grid.columns - 1;
    for (let n = last; n >= Math.max(0, last - 3); n--) {
      if (this.series.some(({ values }) => values[n] !== null && values[n] !== undefined)) return n;
    }
    return last;
  }

  _x(column) {
    return LEFT + (column / this.grid.columns) * (this.width - LEFT - RIGHT);
  }

  _middle(column) {
    const { places, columns } = this.grid;
    return this._x(places ? places[column][0] * columns : column + 0.5);
  }

  _y(value) {
    const [low, high] = this.range;
    const part =
      this.scale === "log"
        ? (Math.log10(Math.max(value, low)) - Math.log10(low)) / (Math.log10(high) - Math.log10(low))
        : value / high;
    return this.height - BOTTOM - part * (this.height - BOTTOM - TOP);
  }

  _scale() {
    const values = this.series.map((one) => one.values);
    const sums = this.grid.covered.map((_, n) => values.reduce((sum, of) => sum + (of[n] ?? 0), 0));
    const single = values.flat().filter((value) => value !== null && value > 0);
    if (this.scale === "share") this.marks = [0, 0.25, 0.5, 0.75, 1];
    else if (this.scale === "log") this.marks = decades(Math.min(...single), Math.max(0, ...single));
    else this.marks = steps(Math.max(0, ...(this.kind === "stacked" ? sums : single)), this.scale === "bytes");
    this.range = [this.marks[0], this.marks[this.marks.length - 1]];
  }

  _axes() {
    const right = this.width - RIGHT,
      below = this.height - BOTTOM;
    const parts = this.marks.flatMap((mark) => {
      const y = Math.round(this._y(mark)) + 0.5;
      const text = element("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, this.text(mark, true));
      return [element("line", { class: "axis", x1: LEFT, x2: right, y1: y, y2: y }), text];
    });
    for (const [x, name] of this._ticks()) {
      if (x < LEFT + 16 || x > right - 16) continue; // its text would leave the plot
      parts.push(element("line", { class: "tick", x1: x, x2: x, y1: below, y2: below + 4 }));
      parts.push(element("text", { x, y: this.height - 5, "text-anchor": "middle" }, name));
    }
    return parts;
  }

  /** [x, its text]: round times, a date at midnight; of places those that there is room for. */
  _ticks() {
    const { begin, step, columns, places } = this.grid,
      span = step * columns;
    const ticks = [];
    if (places) {
      places.forEach(([, name], n) => {
        const x = this._middle(n);
        if (!ticks.length || x - ticks.at(-1)[0] >= TICK_APART) ticks.push([x, name]);
      });
      return ticks;
    }
    const apart = TICKS_S.find((tick) => tick >= step && (tick / span) * (this.width - LEFT - RIGHT) >= 76) ?? TICKS_S_MAX;
    for (let at = Math.ceil(begin / apart) * apart; at <= begin + span; at += apart)
      ticks.push([this._x((at - begin) / step), at % DAY_S ? clock(at) : day(at)]);
    return ticks;
  }

  /** Hatched where nobody counted, after somebody had. */
  _gaps() {
    const { covered, columns } = this.grid;
    const first = covered.indexOf(true);
    const parts = [];
    for (let from = first; from >= 0 && from < columns; from++) {
      if (covered[from]) continue;
      let to = from;
      while (to < columns && !covered[to]) to++;
      const x = this._x(from);
      const width = this._x(to) - x,
        middle = (this.height - BOTTOM + TOP) / 2;
      parts.push(element("rect", { class: "gap", x, y: TOP, width, height: this.height - BOTTOM - TOP }));
      if (width > 70)
        parts.push(element("text", { x: x + width / 2, y: middle, "text-anchor": "middle" }, "no answer"));
      from = to;
    }
    return parts;
  }

  /** The column at this part of the plot's width. */
  _nearest(part) {
    const { places, columns } = this.grid;
    if (!places) return Math.min(columns - 1, Math.max(0, Math.floor(part * columns)));
    const far = places.map(([at]) => Math.abs(at - part));
    return far.indexOf(Math.min(...far));
  }

  _marks() {
    if (this.kind === "stacked") return this._layers();
    return [...this.series].reverse().flatMap((one) => this._line(one)); // the first one is above all others
  }

  _layers() {
    const floor = new Array(this.grid.columns).fill(0);
    const wide = this._x(1) - this._x(0);
    const gap = wide > BAR_WIDTH ? Math.max(0.09 * wide, (wide - BAR_WIDTH_MAX) / 2) : 0;
    return this.series.flatMap(({ colour, values }) => {
      let path = "",
        edge = "";
      values.forEach((value, n) => {
        if (!(value > 0)) return;
        const below = this._y(floor[n]),
          above = this._y(floor[n] + value);
        floor[n] += value;
        const left = (this._x(n) + gap).toFixed(1),
          right = (this._x(n + 1) - gap).toFixed(1);
        path += `M${left} ${below.toFixed(1)}V${above.toFixed(1)}H${right}V${below.toFixed(1)}Z`;
        edge += `M${left} ${above.toFixed(1)}H${right}`; // a line between layers: their colours need not tell them apart
      });
      return path
        ? [element("path", { class: `layer c-${colour}`, d: path }), element("path", { class: "edge", d: edge })]
        : [];
    });
  }

  _line({ colour, values, dash }) {
    let path = "",
      before = false;
    const alone = [];
    values.forEach((value, n) => {
      const here = value !== null && value !== undefined;
      if (here) {
        const place = `${this._middle(n).toFixed(1)} ${this._y(value).toFixed(1)}`;
        path += `${before ? "L" : "M"}${place}`;
        if (this.grid.places || (!before && (values[n + 1] ?? null) === null)) alone.push(place.split(" "));
      }
      before = here;
    });
    const style = `line s-${colour} ${dash ?? ""}`;
    const r = dash === "thick" ? 4.5 : 2.5;
    const dots = alone.map(([cx, cy]) => element("circle", { class: `c-${colour}`, cx, cy, r }));
    return path ? [element("path", { class: style, d: path }), ...dots] : [];
  }

  /** One row for each series; rows stay where they are, so that nothing moves while it is read. */
  _legend() {
    const names = this.series.map(({ name }) => name);
    if ([...this.rows.keys()].join("\n") === names.join("\n")) return;
    this.rows.clear();
    const items = this.series.map(({ name, colour, dash, meaning }) => {
      const value = element("b", {});
      const chip = element(
        "svg",
        { class: `key ${this.kind}`, width: 16, height: 12, "aria-hidden": "true" },
        this.kind === "stacked"
          ? element("rect", { class: `c-${colour}`, width: 12, height: 12, rx: 2.5 })
          : element("line", { class: `line s-${colour} ${dash ?? ""}`, x1: 0, x2: 16, y1: 6, y2: 6 }),
      );
      this.rows.set(name, { value });
      return element("li", meaning ? { title: meaning } : {}, chip, element("span", { class: "name" }, name), value);
    });
    this.legend.replaceChildren(...items);
  }

  _listen() {
    const to = (event) => {
      const box = this.svg.getBoundingClientRect();
      if (this.grid) this.cursor.move(this._nearest((event.clientX - box.left - LEFT) / (this.width - LEFT - RIGHT)));
    };
    this.svg.addEventListener("pointermove", to);
    this.svg.addEventListener("pointerdown", to);
    this.svg.addEventListener("pointerleave", () => this.cursor.move(null));
    this.svg.addEventListener("blur", () => this.cursor.move(null));
    this.svg.addEventListener("keydown", (event) => {
      if (!this.grid) return;
      const last = this.grid.columns - 1,
        now = this.cursor.column ?? last;
      const target = {
        ArrowLeft: now - 1,
        ArrowRight: now + 1,
        PageUp: now - 10,
        PageDown: now + 10,
        Home: 0,
        End: last,
      }[event.key];
      if (event.key === "Escape") this.cursor.move(null);
      else if (target !== undefined) {
        event.preventDefault();
        this.cursor.move(Math.min(last, Math.max(0, target)));
      }
    });
  }
}
