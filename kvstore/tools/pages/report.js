// The page of a report, made of the document that `kvstore report -o json` prints; docs/cli.md has its fields.
//
//   hours ──▶ samples ──▶ columns of hours or days ──▶ plots, and one table of them

import { element } from "../web/page/charts.js";
import { REASONS, TIERS, hitRatio, hitTokens, outcomesBar, parts, sum } from "../web/page/outcomes.js";
import { Plots } from "../web/page/plots.js";
import { columnsOf, total } from "../web/page/samples.js";
import { Table, Tile, bar, name, say, together } from "../web/page/tables.js";
import { bytes, count, duration, moment, money, percent, printable, shortCount } from "../web/page/units.js";

const HOUR_S = 3600;

const $ = (id) => document.getElementById(id);
const { document: report, columns: counted, column_s: step, first, version } = JSON.parse($("data").textContent);
const { totals, by, currency, gpu_hour_price: price } = report;
const right = (title) => ({ title, right: true });
const colours = Object.fromEntries(REASONS);
const meanings = Object.fromEntries([...by.tier, ...by.reason].map((one) => [one.tier ?? one.reason, one.meaning]));

say($("version"), version);
const region = report.region ? `, region ${printable(report.region)}` : "";
say($("period"), `${moment(report.since_s)} to ${moment(report.until_s)} UTC${region}`);
if (first) showFirst();
$("figures").hidden = !totals.tokens;
if (totals.tokens) {
  showTiles();
  showWhole();
  showTimes();
  showReasons();
  showGroups("model", "Models", "(no name)");
  showGroups("tenant", "Tenants", "(no tenant)");
  showPrefixes();
} else {
  say($("verdict"), "No engine looked anything up in this time, so there is nothing to report.");
}

/** A table of whoever made this page, before all others. */
function showFirst() {
  $("first").hidden = false;
  const columns = first.columns.map((title, n) => ({ title, right: typeof first.rows[0]?.[n] === "number" }));
  const said = (cell) => (typeof cell === "number" ? cell.toLocaleString("en") : cell);
  const table = new Table($("first"), first.title, columns, "", Infinity);
  table.fill(
    first.rows.map((row) => row.map(said)),
    first.note,
  );
  $("first").append(element("p", { class: "note" }, first.caption), ...first.problems.map((one) => element("p", { class: "problem" }, `■ ${one}`)));
}

// -- what it came to --

function showTiles() {
  const tile = (what, figure, means) => new Tile($("tiles"), what).fill(figure, means);
  const asked = shortCount(totals.tokens - totals.engine_tokens);
  const tiers = by.tier.map(({ tier, hit_ratio: ratio }) => `${TIERS[tier] ?? tier} ${percent(ratio)}`);
  tile("Hit rate", percent(totals.hit_ratio), `of ${asked} tokens asked for: ${tiers.join(", ")}`);
  const lookups = `${count(totals.lookups)} lookups in all`;
  tile("Tokens saved", shortCount(totals.hit_tokens), `loaded and not computed again; ${lookups}`);
  if (totals.prefill_s_saved) tile("Prefill time saved", duration(totals.prefill_s_saved), "of engine time");
  if (totals.prefill_s_saved && price)
    tile("Money saved", money(totals.money_saved, currency), `at ${money(price, currency)} an hour`);
  tile("Given back to engines", bytes(totals.bytes.loaded), `and ${bytes(totals.bytes.stored)} stored`);
  const [most] = by.reason;
  const share = most && (by.reason.length === 1 ? "All of the others missed" : `Of the others ${percent(most.share)} missed`);
  const others = most ? ` ${share} for one reason, ${most.reason}: ${most.meaning}.` : "";
  const came = `Of ${asked} tokens that engines asked for, ${shortCount(totals.hit_tokens)} came from the cache.`;
  say($("verdict"), together(came + others));
}

function showWhole() {
  say(
    $("overall"),
    `Of ${count(totals.tokens)} prompt tokens, ${percent(totals.overall_ratio)} did not have to be computed, the engines' own ` +
      "caches included. Shares here are of all prompt tokens; the hit rate is of those that engines asked for.",
  );
  const pieces = parts(totals.outcomes).map(([colour, what, tokens]) => [tokens / totals.tokens, colour, what, tokens]);
  const keys = pieces.map(([share, colour, what, tokens]) =>
    element(
      "li",
      {},
      element("i", { class: `chip c-${colour}` }),
      element("span", { class: "name" }, what),
      element("b", { title: `${count(tokens)} tokens` }, percent(share)),
    ),
  );
  const drawn = bar("bar", pieces.map(([share, colour, what, tokens]) => [share, colour, `${what}: ${count(tokens)} tokens`]));
  $("whole").append(drawn, element("ul", { class: "legend" }, ...keys));
}

// -- over time --

/** Hours without a row are hours in which nobody asked. */
function showTimes() {
  const samples = counted.map((one) => ({ ...one, from: one.from_s, to: one.from_s + step, tokens: one.outcomes }));
  const begin = samples[0].from,
    until = Math.max(samples.at(-1).to, Math.ceil(report.until_s / step) * step);
  const number = (until - begin) / step;
  const columns = columnsOf(samples, until, step, number);
  const of = columnsOf(samples, until, until - begin, 1)[0];
  const grid = { begin, step, columns: number, covered: columns.map(() => true), idle: "in all" };
  const hours = step / HOUR_S;
  const [length, unit] = hours < 1 ? [step / 60, "minute"] : hours % 24 ? [hours, "hour"] : [hours / 24, "day"];
  const per = length === 1 ? `per ${unit}` : `per ${length} ${unit}s`;
  showTable(columns, per);
  if (number === 1) return showOnce();
  const plots = new Plots(["tokens", "hits", "missed", "bytes"], per);
  const isThere = (tier) => by.tier.some((one) => one.tier === tier);
  const draw = () => plots.showAmounts({ grid, columns, meanings, isThere, of });
  new ResizeObserver(draw).observe(document.querySelector(".charts"));
  draw();
}

/** One bar is no plot: its table says it all. */
function showOnce() {
  for (const id of ["plots", "reading"]) $(id).hidden = true;
  $("times").open = true;
}

function showTable(columns, per) {
  const moved = ["loaded", "stored", "promoted", "demoted"];
  const titles = ["lookups", "tokens", "hits", "hit rate", ...moved];
  const columnsShown = [{ title: "from (UTC)", short: true }, ...titles.map(right)];
  const table = new Table($("table-times"), `All figures ${per}`, columnsShown, "", Infinity);
  table.fill(
    columns.map((column) => {
      const outcomes = {};
      for (const outcome of Object.keys(totals.outcomes)) outcomes[outcome] = total(column, ({ tokens }) => tokens[outcome]) ?? 0;
      return [
        moment(column.from),
        count(total(column, (hour) => hour.lookups) ?? 0),
        count(sum(outcomes)),
        count(hitTokens(outcomes)),
        percent(hitRatio(outcomes)),
        ...moved.map((way) => bytes(total(column, (hour) => hour.bytes[way]) ?? 0)),
      ];
    }),
  );
}

// -- why not, who, what --

function showReasons() {
  const columns = [{ title: "reason", short: true }, { title: "" }, right("share"), right("tokens"), { title: "what it means" }];
  const table = new Table($("table-reasons"), "Why tokens missed, in words", columns, "None did: everything asked for was here.", Infinity);
  table.fill(
    by.reason.map(({ reason, share, tokens, meaning }) => [
      reason,
      { kind: "bar", parts: [[share, colours[reason] ?? "envelope", percent(share)]] },
      percent(share),
      count(tokens),
      meaning,
    ]),
    `${count(totals.missed_tokens)} tokens were not here when asked for, or could not be used. Each has one reason: that of ` +
      "its block. What was held behind a block that did not come cannot be used, and has the reason of that one. A full bar " +
      "is all that missed.",
  );
}

function showGroups(field, title, otherwise) {
  const groups = by[field];
  const most = groups[0].tokens || 1;
  const isTimed = totals.prefill_s_saved > 0,
    isPaid = isTimed && totals.money_saved !== null;
  const titles = ["hit rate", "tokens", "of these hits", "lookups"];
  if (isTimed) titles.push("prefill saved");
  if (isPaid) titles.push("money saved");
  const table = new Table($(`table-${field}`), title, [{ title: field }, { title: "outcomes" }, ...titles.map(right)], "");
  table.fill(
    groups.map((group) =>
      [
        name(group[field], otherwise),
        outcomesBar(group.outcomes, most),
        percent(group.hit_ratio),
        shortCount(group.tokens),
        shortCount(group.hit_tokens),
        count(group.lookups),
        duration(group.prefill_s_saved),
        money(group.money_saved, currency),
      ].slice(0, titles.length + 2),
    ),
    "Most tokens first. A bar is as long as the row has tokens, against the first row; colours as above.",
  );
}

function showPrefixes() {
  const { prefixes } = report;
  const most = Math.max(1, ...prefixes.map(({ tokens_saved: saved }) => saved));
  const columns = [
    { title: "ends with block", short: true },
    { title: "model" },
    { title: "tenant" },
    { title: "", drop: true },
    ...["tokens saved", "hits", "length", "first hit", "last hit"].map(right),
    { title: "lives in", short: true },
  ];
  const table = new Table($("table-prefixes"), "Prefixes that saved most", columns, "No prefix was hit in this time.");
  table.fill(
    prefixes.map((prefix) => [
      { kind: "hash", text: prefix.block_hash },
      name(prefix.model, "(no name)"),
      name(prefix.tenant, "(no tenant)"),
      { kind: "bar", parts: [[prefix.tokens_saved / most, "dram", count(prefix.tokens_saved)]] },
      shortCount(prefix.tokens_saved) + (prefix.error_tokens ? ` ±${shortCount(prefix.error_tokens)}` : ""),
      count(prefix.uses),
      count(prefix.tokens),
      duration(prefix.age_s),
      duration(prefix.idle_s),
      prefix.tiers.map((tier) => TIERS[tier] ?? tier).join(", ") || "gone",
    ]),
    "The longest beginnings of prompts that were found here, with the tokens saved since the first hit; times are ago. ± says " +
      "how much of a figure may belong to another prefix: only the heaviest are counted exactly. Ten digits of a hash are " +
      "shown, all are copied.",
  );
}
