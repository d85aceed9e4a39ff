// The plots over time: which figures of samples are drawn how. The live page has amounts a second, a report those of an hour
// or of days.

import { Chart, Cursor } from "./charts.js";
import { HITS, HIT_COLOURS, REASONS, askedTokens, hitTokens, otherReasons, sum, tokensOf } from "./outcomes.js";
import { columnsOf, lately, middle, rate, total, worst } from "./samples.js";
import { bytes, latency, percent, printable, shortCount } from "./units.js";

const COLUMNS = 180; // of each plot of the live page
const A_SECOND = "a second";
const STILL_S = 15; // the newest sample may be this old without being a gap
const LEVEL_COLOURS = ["ref1", "ref2", "envelope", "ref6", "ref4", "ref5"];
const MOVED = [
  ["loaded", "given back to engines", ""],
  ["stored", "copied into the cache by engines", "dashed"],
  ["promoted", "read from NVMe to DRAM", ""],
  ["demoted", "written from DRAM to NVMe", "dashed"],
];
const CALLS = [
  ["lookup", "ref2"],
  ["acquire", "ref1"],
];

const perSecond = (value, isMark) => bytes(value) + (isMark || !value ? "" : "/s");
const decade = (value, isMark) => (isMark && value >= 1 ? `${value} s` : latency(value));
const share = (value, isMark) => (isMark ? `${100 * value} %` : percent(value));

/** What each plot is of. per: "a second", "per hour", … */
function words(per) {
  return {
    tokens: {
      title: "Where prompt tokens came from",
      unit: `tokens ${per}`,
      kind: "stacked",
      scale: "linear",
      text: shortCount,
      height: 220,
      empty: "No engine has asked for anything in this time.",
    },
    hits: {
      title: "Hit rate, by where the hits were",
      unit: "hits among the tokens asked for",
      kind: "stacked",
      scale: "share",
      text: share,
      empty: "Nobody asked, so nothing could be hit.",
    },
    missed: {
      title: "Why tokens missed",
      unit: `missed tokens ${per}`,
      kind: "stacked",
      scale: "linear",
      text: shortCount,
      empty: "No token missed in this time.",
    },
    calls: {
      title: "Calls of engines",
      unit: "time to the answer, p99 and p50",
      kind: "lines",
      scale: "log",
      text: decade,
      empty: "No calls in this time.",
    },
    loads: {
      title: "Loads, by level",
      unit: "time to load, p99 and p50; of many levels the six slowest",
      kind: "lines",
      scale: "log",
      text: decade,
      empty: "Nothing was loaded from a slower level.",
    },
    bytes: {
      title: "Bytes moved",
      unit: `${per}: by engines loaded and stored; between the tiers promoted and demoted`,
      kind: "lines",
      scale: "bytes",
      text: per === A_SECOND ? perSecond : bytes,
      empty: "No bytes were moved in this time.",
    },
    loop: {
      title: "Delay of the daemon's loop",
      unit: "how late it came to a piece of work, p99 and p50",
      kind: "lines",
      scale: "log",
      text: decade,
      empty: "Not measured in this time.",
    },
  };
}

export class Plots {
  /** ids: of the plots that the page has. per: what amounts are of. */
  constructor(ids, per = A_SECOND) {
    this.cursor = new Cursor();
    this.amount = per === A_SECOND ? rate : total;
    const chart = (id) => new Chart(document.getElementById(`chart-${id}`), this.cursor, words(per)[id]);
    this.charts = Object.fromEntries(ids.map((id) => [id, chart(id)]));
  }

  /** All of the live page. view: {live, meanings, samples, nowS, span}; see page.js. */
  showLive(view) {
    const { live, samples, nowS, span } = view;
    const { grid, columns } = gridOf(view);
    const isThere = (tier) => live.tiers.some(({ name }) => name === tier) || samples.some(({ tokens }) => tokens[tier]);
    this.showAmounts({ ...view, grid, columns, isThere, of: lately(samples, nowS, span) });
    const { calls, loads, loop } = this.charts;
    calls.draw(
      grid,
      CALLS.flatMap(([call, its]) => quantiles(columns, call, its, (sample) => sample.requests?.[call])),
    );
    const levels = slowest(
      live.speeds.map(({ name }) => name),
      columns,
    );
    loads.draw(
      grid,
      levels.flatMap((level, n) =>
        quantiles(columns, printable(level), LEVEL_COLOURS[n], (sample) => sample.loads?.[level]),
      ),
    );
    loop.draw(
      grid,
      quantiles(columns, "loop", "ref2", (sample) => sample.loop_delay),
    );
  }

  /** Tokens and bytes. view: {grid, columns, meanings, isThere: whether a tier is shown, of: a column of the whole time}. */
  showAmounts(view) {
    this._tokens(view);
    this._missed(view);
    this.charts.bytes.draw(
      view.grid,
      MOVED.map(([way, meaning, dash]) => ({
        ...this._amount(view, way, way, (sample) => sample.bytes?.[way]),
        meaning,
        dash,
      })),
    );
  }

  // -- helpers --

  /** A series of amounts; `of` a sample. */
  _amount({ columns, of: all }, name, colour, of) {
    return { name, colour, values: columns.map((one) => this.amount(one, of)), whole: total(all, of) };
  }

  _tokens(view) {
    const { grid, columns, meanings, of: all } = view;
    const tiers = HITS.filter(([tier]) => view.isThere(tier));
    const computed = ({ tokens }) => askedTokens(tokens) - hitTokens(tokens);
    const layers = [["engine", "engine's own", "engine"], ...tiers.map(([tier, name]) => [tier, name, HIT_COLOURS[tier]])];
    this.charts.tokens.draw(grid, [
      ...layers.map(([outcome, name, colour]) => ({
        ...this._amount(view, name, colour, ({ tokens }) => tokens[outcome]),
        meaning: meanings[outcome],
      })),
      {
        ...this._amount(view, "computed", "never", computed),
        meaning: "missed: was not here, or could not be used",
      },
    ]);
    const ratio = (column, tier) => {
      const asked = total(column, ({ tokens }) => askedTokens(tokens));
      return asked ? total(column, ({ tokens }) => tokens[tier]) / asked : null;
    };
    this.charts.hits.draw(
      grid,
      tiers.map(([tier, name]) => ({
        name,
        colour: HIT_COLOURS[tier],
        meaning: meanings[tier],
        values: columns.map((one) => ratio(one, tier)),
        whole: ratio(all, tier),
      })),
    );
  }

  _missed(view) {
    const { grid, meanings, of: all } = view;
    const tokens = tokensOf(all);
    const drawn = REASONS.filter(([reason]) => reason === "never_seen" || tokens[reason]);
    const layers = drawn.map(([reason, colour]) => ({
      ...this._amount(view, reason, colour, (sample) => sample.tokens[reason]),
      meaning: meanings[reason],
    }));
    const others = otherReasons(tokens);
    if (others.length) {
      const name = others.length === 1 ? others[0] : "others";
      const of = (sample) => sum(others.map((reason) => sample.tokens[reason] ?? 0));
      layers.push({ ...this._amount(view, name, "envelope", of), meaning: others.join(", ") });
    }
    this.charts.missed.draw(grid, layers);
  }
}

/** Of many levels those that had the slowest loads, in the order in which they came. */
function slowest(levels, columns) {
  if (levels.length <= LEVEL_COLOURS.length) return levels;
  const p99 = (level) => Math.max(0, ...columns.map((one) => worst(one, (sample) => sample.loads?.[level]?.[2]) ?? 0));
  const known = new Map(levels.map((level) => [level, p99(level)]));
  const chosen = [...levels].sort((a, b) => known.get(b) - known.get(a)).slice(0, LEVEL_COLOURS.length);
  return levels.filter((level) => chosen.includes(level));
}

function gridOf({ samples, nowS, span }) {
  const step = span / COLUMNS,
    until = Math.ceil(nowS / step) * step;
  const columns = columnsOf(samples, until, step, COLUMNS);
  const covered = columns.map(({ seconds }) => seconds > 0);
  for (let n = COLUMNS - 1; n >= 0 && columns[n].from + step > nowS - STILL_S; n--) covered[n] = true; // not here yet
  return { grid: { begin: until - COLUMNS * step, step, columns: COLUMNS, covered }, columns };
}

/** Two lines of something that takes time; `of` a sample: [how many, p50, p99]. */
function quantiles(columns, what, colour, of) {
  return [
    { name: `${what} p99`, colour, values: columns.map((one) => worst(one, (sample) => of(sample)?.[2])) },
    {
      name: `${what} p50`,
      colour,
      dash: "thin",
      values: columns.map((one) => middle(one, (sample) => of(sample)?.[1])),
    },
  ];
}
