// The page of a replay, made of the document that `kvstore replay -o json` prints: hit rates by policy and capacity.

import { Chart, Cursor } from "../web/page/charts.js";
import { Table, Tile, say, together } from "../web/page/tables.js";
import { NOTHING, count, duration, percent, printable } from "../web/page/units.js";

const OURS = "kvstore",
  ENVELOPE = "envelope",
  BOUND = "belady",
  EVERYTHING = "infinite";
const SHOWN = 0.0005; // a twentieth of a point: less counts as equal
const STYLES = {
  [OURS]: ["ours", "thick", " (ours)"],
  [ENVELOPE]: ["envelope", "dashed", ""],
  [BOUND]: ["bound", "dotted", " (bound)"],
  [EVERYTHING]: ["bound", "dotted", " (bound), level"],
};
const LINES = [
  [[OURS], "the thick line is ours"],
  [[ENVELOPE], "the dashed line is the envelope, the best reference at each capacity"],
  [[BOUND, EVERYTHING], "a dotted line is a bound: belady at a capacity, which is approximate, infinite at any"],
];

const $ = (id) => document.getElementById(id);
const { document: replay, traces, drop_tail: dropTail, lasted_s: lastedS, version } = JSON.parse($("data").textContent);
const ratios = ratiosOf(); // policy: Map of capacity and hit rate
const best = ratios[ENVELOPE];
const everything = ratios[EVERYTHING] ? Math.max(...ratios[EVERYTHING].values()) : null;
const fractions = [
  ...new Set(Object.entries(ratios).flatMap(([policy, row]) => (policy === EVERYTHING ? [] : [...row.keys()]))),
].sort((a, b) => a - b);
// Those of this replay, in the order of the page's own list.
const policies = [...$("policies").children].map((one) => one.firstElementChild.textContent).filter((one) => ratios[one]);
const references = policies.filter((policy) => !STYLES[policy]);

say($("version"), version);
const tail = dropTail ? ", without the partly filled last blocks" : "";
say($("period"), `Recorded traffic: ${traces.map(printable).join(", ")}${tail}`);
showTiles();
showVerdict();
showPlot();
showTable();
for (const one of [...$("policies").children]) if (!ratios[one.firstElementChild.textContent]) one.remove();

function ratiosOf() {
  const found = {};
  for (const { policy, capacity_fraction: fraction, hit_ratio: ratio } of replay.results)
    (found[policy] ??= new Map()).set(fraction, ratio);
  const envelope = Object.entries(replay.envelope).map(([fraction, ratio]) => [Number(fraction), ratio]);
  if (envelope.length) found[ENVELOPE] = new Map(envelope);
  return found;
}

/** The hit rate of a policy at a capacity; null where it was not replayed there. */
function ratioOf(policy, fraction) {
  return policy === EVERYTHING ? everything : (ratios[policy].get(fraction) ?? null);
}

/** By how much a policy is above the envelope; null where there is none. */
function lead(policy, fraction) {
  const ratio = ratioOf(policy, fraction);
  return ratio === null || !best?.has(fraction) ? null : ratio - best.get(fraction);
}

function capacity(fraction) {
  return `${Number((100 * fraction).toPrecision(6))} %`;
}

/** 0.0123 -> "+1.2". */
function points(difference) {
  const rounded = Math.round(1000 * difference) / 10;
  return `${rounded < 0 ? "" : "+"}${rounded.toFixed(1)}`.replace("-0.0", "+0.0");
}

function showTiles() {
  const tile = (what, figure, means) => new Tile($("tiles"), what).fill(figure, means);
  const { requests, block_refs: asked, unique_blocks: unique } = replay.trace;
  tile("Requests", count(requests), `recorded${lastedS > 0 ? ` in ${duration(lastedS)}` : ""}`);
  tile("Blocks asked for", count(asked), `of ${count(unique)} different ones`);
  if (everything !== null)
    tile("At most", percent(everything), "can be hit at all: the rest had never been asked for before");
  if (ratios[OURS] && fractions.length) {
    const middle = fractions[Math.floor(fractions.length / 2)];
    const difference = lead(OURS, middle);
    const against = difference === null ? "" : `${points(difference)} points against the best reference`;
    tile(`Ours at ${capacity(middle)} capacity`, percent(ratioOf(OURS, middle)), against);
  }
}

/** One sentence: who is ahead at which capacities. */
function showVerdict() {
  if (!ratios[OURS] || !best) return;
  const groups = [
    ["more at", (by) => by >= SHOWN],
    ["as much at", (by) => Math.abs(by) < SHOWN],
    ["less at", (by) => by <= -SHOWN],
  ];
  const clauses = groups.flatMap(([words, is]) => {
    const which = fractions.filter((fraction) => is(lead(OURS, fraction))).map(capacity);
    return which.length ? [`${words} ${joined(which)} capacity`] : [];
  });
  const others = references.length === 1 ? references[0] : `the best of the ${references.length} references`;
  say($("verdict"), together(`Against ${others} ours hits ${joined(clauses)}.`));
}

function joined(words) {
  return words.length > 1 ? `${words.slice(0, -1).join(", ")} and ${words.at(-1)}` : words[0];
}

function showPlot() {
  $("plot").hidden = fractions.length < 2;
  if (fractions.length < 2) return;
  const chart = new Chart($("chart-capacity"), new Cursor(), {
    title: "Hit rate by capacity",
    unit: "hit rate at a capacity, which is a share of all different blocks (logarithmic)",
    kind: "lines",
    scale: "linear",
    text: (value, isMark) => (isMark ? `${Number((100 * value).toPrecision(3))} %` : percent(value)),
    empty: "Nothing was hit.",
    height: 430,
  });
  const [low, high] = [Math.log(fractions[0]), Math.log(fractions.at(-1))];
  const places = fractions.map((fraction) => [0.07 + (0.86 * (Math.log(fraction) - low)) / (high - low), capacity(fraction)]);
  const grid = { places, columns: fractions.length, covered: fractions.map(() => true), idle: "" };
  const series = policies.map((policy) => {
    const [colour, dash, more] = STYLES[policy] ?? [`ref${1 + (references.indexOf(policy) % 6)}`, "", ""];
    return { name: policy + more, colour, dash, values: fractions.map((fraction) => ratioOf(policy, fraction)) };
  });
  const draw = () => chart.draw(grid, series);
  new ResizeObserver(draw).observe($("plot"));
  draw();
  const drawn = LINES.filter(([which]) => which.some((policy) => ratios[policy])).map(([, words]) => words);
  say($("note"), `Higher is better.${drawn.length ? ` Of the lines, ${drawn.join("; ")}.` : ""} Point at the plot to read its values.`);
}

function showTable() {
  $("table-figures").hidden = !fractions.length;
  const titles = fractions.flatMap((fraction) => [`at ${capacity(fraction)}`, ...(best ? ["points"] : [])]);
  const columns = [{ title: "policy", short: true }, ...titles.map((title) => ({ title, right: true }))];
  const table = new Table($("table-figures"), "All figures", columns, "", Infinity);
  table.fill(
    policies.map((policy) => [
      policy,
      ...fractions.flatMap((fraction) => [percent(ratioOf(policy, fraction)), ...(best ? [against(policy, fraction)] : [])]),
    ]),
    `The hit rate at each capacity${best ? ", and by how many points it is above the envelope" : ""}.`,
  );
  if (ratios[OURS]) table.body.rows[0].classList.add("marked");
}

/** A policy beside the envelope, in a cell. */
function against(policy, fraction) {
  const difference = lead(policy, fraction);
  if (difference === null || [ENVELOPE, EVERYTHING].includes(policy)) return NOTHING;
  return difference === 0 && references.includes(policy) ? "best" : points(difference);
}
