// The tables: what is so now, or since the daemon started.

import { MEMORIES, isNear } from "./attention.js";
import { TIERS, hitRatio, isMiss, outcomesBar, spanText, sum, tokensOf } from "./outcomes.js";
import { lately } from "./samples.js";
import { Facts, Table, name } from "./tables.js";
import { NOTHING, bytes, count, duration, latency, percent, plural, printable, shortCount } from "./units.js";

const place = (id) => document.getElementById(`table-${id}`);
const table = (id, ...words) => new Table(place(id), ...words);
const right = (title, drop = false) => ({ title, right: true, drop });
const tables = {
  levels: table(
    "levels",
    "Disks and buckets",
    [
      { title: "level", short: true },
      { title: "where" },
      right("used", true),
      { title: "loads", short: true },
      { title: "stores", short: true },
      right("latency"),
      right("bandwidth", true),
      right("waiting", true),
      right("trips", true),
      { title: "why it tripped last", drop: true },
    ],
    "There is no level below DRAM: nvme.directories and regions_file are not set.",
  ),
  tiers: table(
    "tiers",
    "Tiers",
    [
      { title: "tier", short: true },
      right("used"),
      right("of"),
      { title: "", short: true, drop: true },
      right("blocks"),
      right("evicted"),
      right("corrupt", true),
    ],
    "No tier yet.",
  ),
  queues: table(
    "queues",
    "Queues",
    [{ title: "queue", short: true }, right("length"), right("limit"), { title: "", short: true }],
    "All queues are empty.",
  ),
  reasons: table(
    "reasons",
    "Why tokens missed, in words",
    [{ title: "reason", short: true }, right("share"), right("tokens"), { title: "what it means" }],
    "No token missed in this time.",
  ),
  models: table(
    "models",
    "Models and tenants",
    [
      { title: "model" },
      { title: "tenant" },
      { title: "outcomes", drop: true },
      right("hit rate"),
      right("tokens"),
      right("lookups", true),
      right("prefill saved", true),
      right("in DRAM", true),
      right("on NVMe", true),
    ],
    "No engine has looked anything up since the daemon started.",
  ),
  prefixes: table(
    "prefixes",
    "Prefixes that saved most",
    [
      { title: "ends with block", short: true },
      { title: "model" },
      { title: "tenant", drop: true },
      right("length", true),
      right("hits"),
      right("tokens saved"),
      { title: "lives in", short: true, drop: true },
    ],
    "No prefix was hit since the daemon started.",
  ),
  sessions: table(
    "sessions",
    "Sessions",
    [
      { title: "name" },
      { title: "model", drop: true },
      right("pid"),
      right("uid", true),
      right("since"),
      right("requests", true),
      right("blocks hit"),
      right("loaded", true),
      right("stored", true),
      right("leases"),
    ],
    "No engine is connected.",
  ),
  nodes: table(
    "nodes",
    "Nodes of the region",
    [
      { title: "node" },
      { title: "state", short: true },
      right("heard of"),
      right("hit rate"),
      right("DRAM"),
      right("NVMe", true),
      right("sessions", true),
      right("up", true),
      { title: "what is wrong with it", drop: true },
    ],
    "",
  ),
};
const region = new Facts(place("region"), "Region");
const events = new Facts(place("events"), "KV events");

/** view: {live, nodes, meanings, samples, nowS, span}; see page.js. */
export function showTables(view) {
  const { live } = view;
  tables.levels.fill(levelRows(live), budgetText(live.write_budget));
  tables.tiers.fill(
    live.tiers.map((tier) => {
      const share = tier.capacity_bytes ? tier.used_bytes / tier.capacity_bytes : 0;
      const corrupt = live.counters[`corrupt_${tier.name}`] ?? 0;
      return [
        TIERS[tier.name] ?? tier.name,
        bytes(tier.used_bytes),
        bytes(tier.capacity_bytes),
        { kind: "meter", parts: [[share, tier.name, percent(share)]] },
        count(tier.records),
        count(live.counters[`evicted_${tier.name}`] ?? 0),
        { text: count(corrupt), level: corrupt ? "warn" : "" },
      ];
    }),
    "Evicted and corrupt: since the daemon started. A full tier is as it should be.",
  );
  showQueues(live.queues);
  showReasons(view);
  showModels(live.tokens, live.holdings);
  tables.prefixes.fill(
    live.prefixes.map((prefix) => [
      { kind: "hash", text: prefix.block_hash },
      name(prefix.model, "(no name)"),
      name(prefix.tenant, "(no tenant)"),
      count(prefix.tokens),
      count(prefix.uses),
      shortCount(prefix.tokens_saved),
      prefix.tiers.map((tier) => TIERS[tier] ?? tier).join(", ") || "gone",
    ]),
    "The heaviest, since each was first hit. Ten digits are shown, all are copied.",
  );
  const hidden = live.sessions_total - live.sessions.length;
  const sessions = live.sessions.map((one) => [
    name(one.label, "(no name)"),
    name(one.model, "(none yet)"),
    one.pid === null ? "?" : String(one.pid),
    String(one.uid),
    duration(one.connected_s),
    shortCount(one.requests),
    one.asked_blocks ? percent(one.hit_blocks / one.asked_blocks) : NOTHING,
    bytes(one.loaded_bytes),
    bytes(one.stored_bytes),
    count(one.leases),
  ]);
  tables.sessions.fill(
    sessions,
    `${plural(live.sessions_total, "session")}, ${plural(live.door.connections, "connection")}` +
      (hidden > 0 ? `; ${count(hidden)} are not listed` : ""),
  );
  region.fill(live.region ? regionFacts(live.region) : null);
  if (view.nodes) showNodes(view.nodes);
  events.fill(live.events ? eventFacts(live.events) : null);
}

function levelRows({ speeds, breakers, disks }) {
  const left = new Set(breakers);
  const rows = speeds.map((speed) => {
    const its = breakers.filter((breaker) =>
      ["loads", "stores"].some((way) => breaker.name === `${speed.name} ${way}`),
    );
    its.forEach((breaker) => left.delete(breaker));
    const disk = disks.find(({ level }) => level === speed.name);
    return levelRow(printable(speed.name), its, speed, disk);
  });
  return [...rows, ...[...left].map((breaker) => levelRow(printable(breaker.name), [breaker], null))];
}

/** Where a level lies, and how full it is: of what its file system has room for, where that is less than was asked for. */
function placeCells(disk) {
  if (!disk) return [NOTHING, NOTHING];
  const level = ["ok", "reading"].includes(disk.state) ? "" : ["short", "full"].includes(disk.state) ? "warn" : "bad";
  const state = level && disk.state !== "off" ? ` (${disk.state})` : "";
  const title = printable(disk.file_system);
  return [
    { text: `${printable(disk.directory)}${state}`, level, title },
    `${bytes(disk.used_bytes)} of ${bytes(disk.room_bytes)}`,
  ];
}

function levelRow(level, breakers, speed, disk) {
  const cell = (way) => {
    const breaker = breakers.find((one) => one.name.endsWith(` ${way}`));
    if (!breaker) return NOTHING;
    return {
      text: { closed: "● ok", open: "■ off", probing: "▲ trying" }[breaker.state],
      level: { closed: "", open: "bad", probing: "warn" }[breaker.state],
    };
  };
  const last = breakers.filter(({ trips }) => trips).map(({ reason }) => printable(reason));
  const known = speed?.samples > 0;
  return [
    level,
    ...placeCells(disk),
    cell("loads"),
    cell("stores"),
    known ? latency(speed.latency_s) : NOTHING,
    known && speed.bytes_per_s ? `${bytes(speed.bytes_per_s)}/s` : NOTHING,
    speed?.waiting_bytes ? bytes(speed.waiting_bytes) : "0 B",
    count(breakers.reduce((all, { trips }) => all + trips, 0)),
    [...new Set(last)].join("; ") || NOTHING,
  ];
}

function budgetText(spending) {
  if (!spending) return "";
  const { spent_bytes: spent, write_bytes_per_day: daily } = spending;
  return `Write budget: ${bytes(spent)} of ${bytes(daily)} were written to NVMe in the last 24 hours (${percent(spent / daily)}).`;
}

function showQueues(queues) {
  const waits = queues.filter(({ name: queue }) => !MEMORIES.includes(queue));
  const busy = waits.filter(({ length }) => length > 0).sort((a, b) => b.length / b.limit - a.length / a.limit);
  const idle = waits.filter(({ length }) => !length).map(({ name: queue }) => queue);
  const rows = busy.map((queue) => {
    const level = !isNear(queue) ? "" : queue.length >= queue.limit ? "bad" : "warn";
    const said = queue.name.endsWith("_bytes") ? bytes : count;
    return [
      { text: queue.name, level },
      { text: said(queue.length), level },
      said(queue.limit),
      {
        kind: "meter",
        parts: [[queue.length / queue.limit, level ? "other" : "stored", percent(queue.length / queue.limit)]],
      },
    ];
  });
  tables.queues.fill(rows, idle.length ? `Empty: ${idle.join(", ")}` : "");
}

function showReasons({ meanings, samples, nowS, span }) {
  const all = tokensOf(lately(samples, nowS, span));
  const misses = Object.entries(all)
    .filter(([outcome, tokens]) => isMiss(outcome) && tokens >= 0.5)
    .sort((a, b) => b[1] - a[1]);
  const missed = misses.reduce((sums, [, tokens]) => sums + tokens, 0);
  const rows = misses.map(([reason, tokens]) => [
    reason,
    percent(tokens / missed),
    shortCount(tokens),
    meanings[reason] ?? "",
  ]);
  tables.reasons.fill(rows, `Of ${shortCount(missed)} tokens that missed in the last ${spanText(span)}.`);
}

function showModels(rows, holdings) {
  const held = new Map(holdings.map((one) => [JSON.stringify([one.model, one.tenant]), one]));
  const most = Math.max(1, ...rows.map(({ tokens }) => sum(tokens)));
  const sorted = [...rows].sort((a, b) => sum(b.tokens) - sum(a.tokens));
  tables.models.fill(
    sorted.map((row) => [
      name(row.model, "(no name)"),
      name(row.tenant, "(no tenant)"),
      outcomesBar(row.tokens, most),
      percent(hitRatio(row.tokens)),
      shortCount(sum(row.tokens)),
      count(row.lookups),
      row.prefill_s_saved ? duration(row.prefill_s_saved) : NOTHING,
      ...["dram_bytes", "nvme_bytes"].map((field) => bytes(held.get(JSON.stringify([row.model, row.tenant]))?.[field] ?? 0)),
    ]),
    "Since the daemon started, most tokens first; bytes are those held now. A bar is as long as the row has tokens; colours as above." +
      holdings.map(differ).join(""),
  );
}

/** What tells kinds of engines of one model and tenant apart, in a sentence; "" where there is one kind. */
function differ({ model, tenant, kinds, differs }) {
  if (!differs.length) return "";
  const fields = differs.map(({ field, values }) => `${field}: ${values.join(" / ")}`).join("; ");
  const who = `${model || "(no name)"}, ${tenant || "(no tenant)"}`;
  return printable(` ${count(kinds)} kinds of engines of ${who} share nothing: they differ in ${fields}.`);
}

function regionFacts(its) {
  if (!its.open)
    return {
      ...(its.name ? { name: printable(its.name) } : {}),
      state: `not joined: ${printable(its.problem || "joining")}`,
    };
  const shown = {
    name: printable(its.name ?? ""),
    bucket: printable(its.bucket ?? ""),
    durable: `${plural(its.packs ?? 0, "pack")}, ${plural(its.blocks ?? 0, "block")}${its.bytes ? `, ${bytes(its.bytes)}` : ""}`,
  };
  shown.feed =
    (its.feed_age_s ?? null) === null
      ? "not read yet"
      : `read ${duration(its.feed_age_s)} ago` +
        (its.feed_failures ? `; ${plural(its.feed_failures, "failure")}: ${printable(its.feed_failure ?? "")}` : "");
  if (its.fetched_records !== undefined)
    shown.fetched = `${plural(its.fetched_records, "record")}${its.fetched_bytes ? `, ${bytes(its.fetched_bytes)}` : ""}`;
  if (its.corrupt_records || its.failed_records)
    shown.failed = `${count(its.failed_records ?? 0)} not read, ${count(its.corrupt_records ?? 0)} corrupt`;
  for (const far of its.read_through ?? [])
    shown[`reads ${printable(far.name ?? "?")}`] = far.open
      ? `joined; ${plural(far.fetched_records ?? 0, "record")} fetched`
      : `not joined: ${printable(far.problem || "joining")}`;
  return shown;
}

const NODE_LEVELS = { ok: "", warnings: "warn", problems: "bad", silent: "bad" };

function nodeRow(node) {
  const fill = (used, of) => (of ? percent((used ?? 0) / of) : NOTHING);
  const [first] = node.problems;
  return [
    name(node.host, node.writer.slice(0, 8)),
    { text: node.state, level: NODE_LEVELS[node.state] },
    `${duration(node.age_s)} ago`,
    node.hit_ratio === null ? NOTHING : percent(node.hit_ratio),
    fill(node.dram_used_bytes, node.dram_bytes),
    fill(node.nvme_used_bytes, node.nvme_bytes),
    node.sessions === null ? NOTHING : count(node.sessions),
    node.up_s === null ? NOTHING : duration(node.up_s),
    first ? printable(`${first.kind} ${first.subject}: ${first.text}`) : NOTHING,
  ];
}

function showNodes({ nodes, problem }) {
  place("nodes").hidden = !nodes.length && !problem;
  const said = "As each has said itself in the bucket, at least every ten minutes; hit rates are of 15 minutes.";
  const failed = problem.startsWith("node ") ? "Not all of them can be read" : "Not read just now"; // the others are of now
  const note = problem ? `${failed}: ${printable(problem)}` : said;
  tables.nodes.empty = note;
  const wrongFirst = [...nodes].sort((one, other) => (one.state === "ok") - (other.state === "ok"));
  tables.nodes.fill(wrongFirst.map(nodeRow), note);
}

function eventFacts(its) {
  const stored = `${plural(its.stored_blocks ?? 0, "block")} stored, ${count(its.removed_blocks ?? 0)} removed`;
  const told = `${count(its.batches ?? 0)} messages: ${stored}`;
  const lost = its.lost_blocks ? `; ${plural(its.lost_blocks, "block")} lost` : "";
  return {
    endpoint: printable(its.endpoint ?? ""),
    state: its.problem ? `stopped: ${printable(its.problem)}` : "publishing",
    published: told,
    waiting: `${plural(its.waiting_blocks ?? 0, "block")}${lost}`,
  };
}
