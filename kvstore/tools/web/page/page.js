// The live page: asks the web process every two seconds, and shows what it said.
//
//   live.json ─────▶ head, what needs attention, tiles, tables
//   history.json ──▶ samples ──▶ columns ──▶ plots            only what is newer, after the first time
//
// Nothing here is ever parsed as HTML: names of models, tenants and sessions come from clients.

import { attention, problems, verdict } from "./attention.js";
import { showTables } from "./lists.js";
import { HITS, TIERS, hitRatio, spanText, sum, tokensOf } from "./outcomes.js";
import { Plots } from "./plots.js";
import { lately, merge, rate, total } from "./samples.js";
import { Tile, say } from "./tables.js";
import { NOTHING, bytes, clock, duration, latency, percent, printable, shortCount } from "./units.js";

const POLL_MS = 2000; // both together: no failure is noticed later than after five seconds
const ANSWER_MS_MAX = 2500;
const HISTORY_S = 5;
const NODES_S = 10;
const INSTANCE_DIGITS = 8; // shown; all of them when it is pointed at
const NOW_S = 60; // what "now" is in the tiles

const $ = (id) => document.getElementById(id);
const state = {
  span: 900,
  samples: [],
  body: null,
  receivedMs: 0,
  nowS: null,
  pausedS: null, // since when, by the daemon's clock
  downMs: null,
  historyMs: -Infinity,
  nodesMs: -Infinity,
  nodes: null, // of the region
  fresh: true,
};

// -- asking --

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS_MAX) });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

/** The daemon's clock now, by its last answer; ours may be wrong. */
function nowS() {
  return state.nowS === null ? Date.now() / 1000 : state.nowS + (performance.now() - state.receivedMs) / 1000;
}

/** The moment that the page shows: it stands still while somebody looks at it, and at the last answer of a daemon that gives none. */
function shownS() {
  const lastS = state.downMs === null ? undefined : state.body?.live?.now_s;
  return state.pausedS ?? lastS ?? nowS();
}

async function refresh() {
  try {
    const body = await ask("live.json");
    if (state.body?.live && body.live && state.body.live.pid !== body.live.pid) state.fresh = true;
    if (body.live || !state.body) state.body = body;
    if (body.now_s !== null) Object.assign(state, { nowS: body.now_s, receivedMs: performance.now() });
    state.downMs = body.up ? null : (state.downMs ?? performance.now() - 1000 * (body.age_s ?? 0));
    state.problem = body.problem;
  } catch (error) {
    state.downMs ??= Math.max(state.receivedMs, 1);
    state.problem = "";
    state.fresh = true; // what is behind the port next may be another process
    if (!["TypeError", "TimeoutError", "AbortError"].includes(error.name)) state.problem = error.message;
  }
  const isDue = state.fresh || performance.now() - state.historyMs >= 1000 * HISTORY_S;
  const isThere = state.downMs === null || (state.fresh && state.body?.live); // what was before it went away is wanted, too
  if (isDue && isThere) await refreshHistory().catch(() => {}); // asked for again in two seconds
  if (state.body?.live?.region && performance.now() - state.nodesMs >= 1000 * NODES_S) {
    state.nodesMs = performance.now();
    state.nodes = await ask("nodes.json").catch(() => state.nodes);
  }
  show();
}

async function refreshHistory() {
  const { span } = state;
  const newest = state.samples.at(-1);
  const since = state.fresh || !newest ? shownS() - span - 60 : newest.to;
  const { samples } = await ask(`history.json?since=${since}`);
  state.samples = merge(
    state.samples,
    samples.map((sample) => ({ ...sample, from: sample.t - sample.s, to: sample.t })),
  );
  Object.assign(state, { fresh: state.span !== span, historyMs: performance.now() });
}

let timer = 0;
async function poll() {
  clearTimeout(timer);
  if (state.pausedS !== null || document.hidden) return;
  await refresh();
  clearTimeout(timer);
  timer = setTimeout(poll, POLL_MS);
}

// -- what is on the page --

const plots = new Plots(["tokens", "hits", "missed", "calls", "loads", "bytes", "loop"]);
const tile = (...words) => new Tile($("tiles"), ...words);
const tiles = {
  hits: tile("Hit rate, last minute"),
  tokens: tile("Prompt tokens"),
  saved: tile("Prefill saved"),
  lookup: tile("Lookup, p99"),
  dram: tile("DRAM", "dram"),
  nvme: tile("NVMe", "nvme"),
};

// -- showing --

function show() {
  const { body } = state;
  const live = body?.live ?? null;
  showHead(live);
  if (!live) return;
  showTiles(live);
  plots.showLive(view());
  showTables(view());
}

/** What plots and tables are made of. */
function view() {
  const { body, samples, span, nodes } = state;
  return { live: body.live, nodes, meanings: body.meanings ?? {}, samples, nowS: shownS(), span };
}

function showHead(live) {
  const isDown = state.downMs !== null;
  document.body.dataset.state = isDown ? "down" : live ? "live" : "waiting";
  const found = live && !isDown ? attention(live) : [];
  if (live) say($("instance"), printable(live.host || live.instance.slice(0, INSTANCE_DIGITS)));
  if (live) $("instance").title = printable(`instance ${live.instance}, ${live.socket_path}`);
  const pill = $("health");
  if (isDown) {
    say(pill, "■ no answer");
    pill.dataset.health = "down";
    found.push(silence(live));
  } else if (live) {
    say(pill, found.length ? `▲ ${problems(found)}` : "● healthy");
    pill.dataset.health = found.some(({ level }) => level === "bad") ? "bad" : found.length ? "warn" : "ok";
  }
  document.title = [pill.textContent, $("instance").textContent, "kvstore"].filter(Boolean).join(" · ");
  showAttention(found, live);
  showAge();
}

function silence(live) {
  const since = `since ${clock(nowS() - (performance.now() - state.downMs) / 1000, true)} UTC`;
  const kept = live ? " Below is what it said last." : " It may not be running, or still be starting.";
  return {
    level: "bad",
    what: "The daemon does not answer",
    why: `${since}${state.problem ? `: ${printable(state.problem)}` : ""}.${kept}`,
    todo: "kvstore doctor on that node says whether it runs, hangs or is starting",
  };
}

function showAttention(found, live) {
  const list = $("attention").firstElementChild;
  const minute = lately(state.samples, shownS(), NOW_S);
  const tokens = tokensOf(minute);
  const best = HITS.map(([tier]) => tier).sort((a, b) => (tokens[b] ?? 0) - (tokens[a] ?? 0))[0];
  const lines = found.length
    ? found
    : live
      ? [{ level: "", what: "", why: verdict(hitRatio(tokens), tokens[best] ? TIERS[best] : "", live) }]
      : [];
  while (list.children.length > lines.length) list.lastChild.remove();
  lines.forEach(({ level, what, why, todo }, n) => {
    if (!list.children[n]) {
      list.append(document.createElement("li"));
      list.children[n].append(...["b", "span", "i"].map((name) => document.createElement(name)));
    }
    const line = list.children[n];
    if (level) line.dataset.level = level;
    else delete line.dataset.level;
    say(line.firstChild, what);
    say(line.children[1], `${what ? ": " : ""}${why}`);
    say(line.lastChild, todo ? `→ ${todo}` : "");
  });
}

function showAge() {
  const live = state.body?.live;
  if (!live) return;
  const age = Math.max(0, (performance.now() - state.receivedMs) / 1000 + (state.body.age_s ?? 0));
  const region = live.region_name ? `region ${printable(live.region_name)} · ` : "";
  const up = `${region}${live.version} · up ${duration(live.uptime_s)}`;
  const when =
    state.pausedS !== null
      ? `paused at ${clock(state.pausedS, true)} UTC`
      : `updated ${age < 1.5 ? "now" : `${duration(Math.floor(age))} ago`}`;
  say($("facts"), `${up} · ${when}`);
}

function showTiles(live) {
  const minute = lately(state.samples, shownS(), NOW_S),
    span = lately(state.samples, shownS(), state.span);
  const now = tokensOf(minute),
    all = tokensOf(span);
  tiles.hits.fill(percent(hitRatio(now)), `${percent(hitRatio(all))} in the last ${spanText(state.span)}`);
  const tokens = sum(now) / (minute.seconds || 1);
  const own = sum(now) ? `; engines had ${percent((now.engine ?? 0) / sum(now))} themselves` : "";
  tiles.tokens.fill(
    `${shortCount(tokens)}/s`,
    `${shortCount(rate(minute, (sample) => sample.lookups) ?? 0)} lookups/s${own}`,
  );
  const saved = total(span, (sample) => sample.saved_s);
  const share = (total(minute, (sample) => sample.saved_s) ?? 0) / (minute.seconds || 1);
  tiles.saved.fill(
    saved ? duration(saved) : NOTHING,
    saved
      ? `in the last ${spanText(state.span)}; now ${shortCount(share)} s each second`
      : `nothing in the last ${spanText(state.span)}`,
  );
  const call = state.body.sample?.requests?.lookup;
  tiles.lookup.fill(
    latency(call?.[2] ?? null),
    call
      ? `p50 ${latency(call[1])}; loop late by ${latency(state.body.sample.loop_delay?.[2] ?? null)}`
      : "no lookups just now",
  );
  for (const tier of ["dram", "nvme"])
    showFill(
      tiles[tier],
      live.tiers.find(({ name: it }) => it === tier),
      live.counters,
    );
}

function showFill(shown, tier, counters) {
  if (!tier) return shown.fill(NOTHING, "not configured");
  const share = tier.capacity_bytes ? tier.used_bytes / tier.capacity_bytes : 0;
  const evicted = counters[`evicted_${tier.name}`] ?? 0;
  return shown.fill(
    percent(share),
    `${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}; ${shortCount(evicted)} evicted`,
    share,
  );
}

// -- what can be pressed --

function pressed(button, is) {
  button.setAttribute("aria-pressed", String(is));
}

for (const button of document.querySelectorAll("[data-span]")) {
  button.addEventListener("click", async () => {
    state.span = Number(button.dataset.span);
    for (const other of document.querySelectorAll("[data-span]")) pressed(other, other === button);
    state.fresh = true;
    plots.cursor.move(null);
    if (state.pausedS !== null) await refreshHistory().catch(() => {});
    else await poll();
    show();
  });
}
$("pause").addEventListener("click", () => {
  const pauses = state.pausedS === null;
  state.pausedS = pauses ? nowS() : null;
  pressed($("pause"), pauses);
  say($("pause"), pauses ? "Go on" : "Pause");
  showAge();
  poll();
});
document.addEventListener("visibilitychange", poll);
new ResizeObserver(() => state.body?.live && plots.showLive(view())).observe(document.querySelector(".charts"));
setInterval(() => !document.hidden && showAge(), 1000);
poll();
