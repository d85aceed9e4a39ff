// What somebody who was woken up should know first: what is broken ("bad"), what is not as it should be ("warn").

import { bytes, duration, latency, percent, plural, printable } from "./units.js";

export const QUEUE_NEAR = 0.8; // of its limit
export const LOOP_SLOW_S = 0.05; // the daemon promises 5 ms a piece; beyond this, calls of engines wait noticeably
export const FEED_LATE_S = 60;
export const BUDGET_NEAR = 0.95;
// Memories of the latest ones, and not queues: full is how they always are.
export const MEMORIES = ["suspects", "probe_targets", "tickets", "prompts"];

export function isNear(queue) {
  return queue.limit > 0 && queue.length >= QUEUE_NEAR * queue.limit && !MEMORIES.includes(queue.name);
}

/** [{level, what, why}], the worst first. newest: the newest sample, or null. */
export function attention(live, newest) {
  const found = [
    ...live.health.problems.map((problem) => ({ level: "bad", what: "Not healthy", why: problem })),
    ...live.breakers.filter(({ state }) => state !== "closed").map(breaker),
    ...live.queues.filter(isNear).map(({ name, length, limit }) => ({
      level: length >= limit ? "bad" : "warn",
      what: length >= limit ? "Queue full" : "Queue nearly full",
      why: `${name}: ${length} of ${limit}`,
    })),
    ...slow(newest),
    ...budget(live.write_budget),
    ...(live.region ? region(live.region) : []),
    ...(live.events?.problem ? [{ level: "bad", what: "Routers are told nothing", why: live.events.problem }] : []),
    ...(live.adopting
      ? [{ level: "warn", what: "Starting", why: "still reading what NVMe holds; hits from it come back meanwhile" }]
      : []),
  ];
  return found
    .map((one) => ({ ...one, why: printable(one.why) }))
    .sort((a, b) => (a.level === b.level ? 0 : a.level === "bad" ? -1 : 1));
}

function breaker({ name, state, reason, retry_in_s: retry }) {
  const again = state === "open" ? `tried again in ${duration(Math.ceil(retry))}` : "being tried with one job now";
  return {
    level: "bad",
    what: `${name} ${state === "open" ? "switched off" : "on probation"}`,
    why: `${reason}; ${again}`,
  };
}

function slow(newest) {
  const p99 = newest?.loop_delay?.[2];
  if (!(p99 > LOOP_SLOW_S)) return [];
  return [
    {
      level: "warn",
      what: "Slow",
      why: `the daemon's loop is ${latency(p99)} late (p99): engines wait that long for answers`,
    },
  ];
}

function budget(spending) {
  if (!spending) return [];
  const { spent_bytes: spent, write_bytes_per_day: daily } = spending;
  if (spent < BUDGET_NEAR * daily) return [];
  return [
    {
      level: "warn",
      what: "Write budget",
      why: `${bytes(spent)} of ${bytes(daily)} a day are spent (${percent(spent / daily)}); little is written to NVMe`,
    },
  ];
}

function region(region) {
  if (!region.open) return [{ level: "bad", what: "Region not joined", why: region.problem || "joining" }];
  if (!(region.feed_age_s > FEED_LATE_S)) return [];
  return [{ level: "warn", what: "Region is late", why: `its feed was read ${duration(region.feed_age_s)} ago` }];
}

/** One sentence for when all is well. */
export function verdict(ratio, best, live) {
  const who = live.sessions_total ? "" : " No engine is connected.";
  if (ratio === null) return `Nothing needs attention.${who} Nobody asked for anything in the last minute.`;
  const from = best ? `, most of it from ${best}` : "";
  return `Nothing needs attention. ${percent(ratio)} of what engines asked for in the last minute came from the cache${from}.${who}`;
}

export function problems(found) {
  return plural(found.length, "problem");
}
