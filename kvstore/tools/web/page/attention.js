// What somebody who was woken up should know first: what is broken ("bad"), what is not as it should be ("warn").
// The daemon knows it (kvstore/daemon/attention.py); here it is only put into words.

import { count, duration, percent, plural, printable } from "./units.js";

export const QUEUE_NEAR = 0.8; // of its limit
// Memories of the latest ones, and not queues: full is how they always are.
export const MEMORIES = ["suspects", "probe_targets", "tickets", "prompts"];

export function isNear(queue) {
  return queue.limit > 0 && queue.length >= QUEUE_NEAR * queue.limit && !MEMORIES.includes(queue.name);
}

/** [{level, what, why, todo}], the worst first. */
export function attention(live) {
  const found = live.problems.map(({ kind, subject, level, text, fix, since_s: since, count: times }) => ({
    level: level === "problem" ? "bad" : "warn",
    what: printable(`${kind.replaceAll("_", " ")} ${subject}`),
    why: printable(
      `${text} (for ${duration(Math.max(0, Math.round(live.now_s - since)))}${times > 1 ? `, ${count(times)} times` : ""})`,
    ),
    todo: printable(fix),
  }));
  if (live.adopting)
    found.push({ level: "warn", what: "Starting", why: "still reading what NVMe holds; hits from it come back meanwhile" });
  return found;
}

/** One sentence for when all is well. */
export function verdict(ratio, best, live) {
  const who = live.sessions_total ? "" : " No engine is connected.";
  if (ratio === null) return `Nothing needs attention.${who} Nobody asked for anything in the last minute.`;
  const from = best ? `, most of it from ${best}` : "";
  return `Nothing needs attention. ${percent(ratio)} of what engines asked for in the last minute came from the cache${from}.${who}`;
}

/** "1 problem, 2 warnings", as `kvstore status` says it. */
export function problems(found) {
  const bad = found.filter(({ level }) => level === "bad").length;
  const counts = [
    [bad, "problem"],
    [found.length - bad, "warning"],
  ];
  return counts.filter(([number]) => number).map(([number, word]) => plural(number, word)).join(", ");
}
