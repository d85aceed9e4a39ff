// The plots: which figures of the samples are drawn how.

import { Chart, Cursor } from "./charts.js";
import { HITS, HIT_COLOURS, askedTokens, hitTokens, isMiss, sum, tokensOf } from "./outcomes.js";
import { columnsOf, lately, middle, rate, total, worst } from "./samples.js";
import { bytes, latency, percent, printable, shortCount } from "./units.js";

export const COLUMNS = 180; // of each plot
const STILL_S = 15; // the newest sample may be this old without being a gap
// Reasons that have a colour of their own; the others are drawn as one.
const REASONS = [
  ["never_seen", "never"],
  ["evicted_dram", "evicted"],
  ["evicted_nvme", "buried"],
  ["slower", "ref4"],
  ["not_admitted", "ref5"],
  ["over_quota", "ref6"],
  ["writing", "ref2"],
  ["unavailable", "other"],
  ["partial_block", "tail"],
];
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

export const cursor = new Cursor();
const place = (id) => document.getElementById(`chart-${id}`);
const perSecond = (value, isMark) => bytes(value) + (isMark || !value ? "" : "/s");
const decade = (value, isMark) => (isMark && value >= 1 ? `${value} s` : latency(value));
const chart = (id, words) => new Chart(place(id), cursor, words);
const charts = {
  tokens: chart("tokens", {
    title: "Where prompt tokens came from",
    unit: "tokens a second",
    kind: "stacked",
    scale: "linear",
    text: shortCount,
    height: 220,
    empty: "No engine has asked for anything in this time.",
  }),
  hits: chart("hits", {
    title: "Hit rate, by where the hits were",
    unit: "hits among the tokens asked for",
    kind: "stacked",
    scale: "share",
    text: (value, mark) => (mark ? `${100 * value} %` : percent(value)),
    empty: "Nobody asked, so nothing could be hit.",
  }),
  missed: chart("missed", {
    title: "Why tokens missed",
    unit: "missed tokens a second",
    kind: "stacked",
    scale: "linear",
    text: shortCount,
    empty: "No token missed in this time.",
  }),
  calls: chart("calls", {
    title: "Calls of engines",
    unit: "time to the answer, p99 and p50",
    kind: "lines",
    scale: "log",
    text: decade,
    empty: "No calls in this time.",
  }),
  loads: chart("loads", {
    title: "Loads, by level",
    unit: "time to load, p99 and p50; of many levels the six slowest",
    kind: "lines",
    scale: "log",
    text: decade,
    empty: "Nothing was loaded from a slower level.",
  }),
  bytes: chart("bytes", {
    title: "Bytes moved",
    unit: "a second: by engines loaded and stored; between the tiers promoted and demoted",
    kind: "lines",
    scale: "bytes",
    text: perSecond,
    empty: "No bytes were moved in this time.",
  }),
  loop: chart("loop", {
    title: "Delay of the daemon's loop",
    unit: "how late it came to a piece of work, p99 and p50",
    kind: "lines",
    scale: "log",
    text: decade,
    empty: "Not measured in this time.",
  }),
};

/** view: {live, meanings, samples, nowS, span}; see page.js. */
export function showPlots(view) {
  const { grid, columns } = gridOf(view);
  showTokens(view, grid, columns);
  showMissed(view, grid, columns);
  charts.calls.draw(
    grid,
    CALLS.flatMap(([call, its]) => quantiles(columns, call, its, (sample) => sample.requests?.[call])),
  );
  const levels = slowest(
    view.live.speeds.map(({ name }) => name),
    columns,
  );
  charts.loads.draw(
    grid,
    levels.flatMap((level, n) =>
      quantiles(columns, printable(level), LEVEL_COLOURS[n], (sample) => sample.loads?.[level]),
    ),
  );
  charts.bytes.draw(
    grid,
    MOVED.map(([way, meaning, dash]) => ({
      name: way,
      colour: way,
      dash,
      meaning,
      values: columns.map((one) => rate(one, (sample) => sample.bytes?.[way])),
    })),
  );
  charts.loop.draw(
    grid,
    quantiles(columns, "loop", "ref2", (sample) => sample.loop_delay),
  );
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

function showTokens({ live, meanings, samples }, grid, columns) {
  const isThere = (tier) => live.tiers.some(({ name }) => name === tier) || samples.some(({ tokens }) => tokens[tier]);
  const tiers = HITS.filter(([tier]) => isThere(tier));
  const of = (outcome) => columns.map((one) => rate(one, ({ tokens }) => tokens[outcome]));
  const layer = ([tier, words], values) => ({
    name: words,
    colour: HIT_COLOURS[tier],
    meaning: meanings[tier],
    values,
  });
  const computed = columns.map((one) => rate(one, ({ tokens }) => askedTokens(tokens) - hitTokens(tokens)));
  charts.tokens.draw(grid, [
    { name: "engine's own", colour: "engine", meaning: meanings.engine, values: of("engine") },
    ...tiers.map((tier) => layer(tier, of(tier[0]))),
    { name: "computed", colour: "never", meaning: "missed: was not here, or could not be used", values: computed },
  ]);
  const asked = columns.map((one) => total(one, ({ tokens }) => askedTokens(tokens)));
  const share = (tier) =>
    columns.map((one, n) => (asked[n] ? total(one, ({ tokens }) => tokens[tier]) / asked[n] : null));
  charts.hits.draw(
    grid,
    tiers.map((tier) => layer(tier, share(tier[0]))),
  );
}

function showMissed({ meanings, samples, nowS, span }, grid, columns) {
  const all = tokensOf(lately(samples, nowS, span));
  const drawn = REASONS.filter(([reason]) => reason === "never_seen" || all[reason]);
  const others = Object.keys(all).filter(
    (outcome) => isMiss(outcome) && all[outcome] && !REASONS.some(([reason]) => reason === outcome),
  );
  const layers = drawn.map(([reason, colour]) => ({
    name: reason,
    colour,
    meaning: meanings[reason],
    values: columns.map((one) => rate(one, ({ tokens }) => tokens[reason])),
  }));
  if (others.length) {
    const values = columns.map((one) => rate(one, ({ tokens }) => sum(others.map((reason) => tokens[reason] ?? 0))));
    layers.push({
      name: others.length === 1 ? others[0] : "others",
      colour: "envelope",
      meaning: others.join(", "),
      values,
    });
  }
  charts.missed.draw(grid, layers);
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
