// What became of tokens, in the words and colours of our pages. The names are those of kvstore/protocol/outcomes.py.

import { count } from "./units.js";

export const HITS = [
  ["dram", "DRAM"],
  ["nvme", "NVMe"],
  ["shared", "bucket"],
  ["read_through", "other region"],
];
export const HIT_COLOURS = { dram: "dram", nvme: "nvme", shared: "shared", read_through: "ref6" };
export const TIERS = Object.fromEntries(HITS);
// Reasons that have a colour of their own; the others are drawn as one.
export const REASONS = [
  ["never_seen", "never"],
  ["evicted_dram", "evicted"],
  ["evicted_nvme", "buried"],
  ["slower", "ref4"],
  ["not_admitted", "ref5"],
  ["over_quota", "quota"],
  ["writing", "ref2"],
  ["unavailable", "other"],
  ["partial_block", "tail"],
];

export const sum = (of) => Object.values(of ?? {}).reduce((all, value) => all + value, 0);
export const isHit = (outcome) => outcome in TIERS;
export const isMiss = (outcome) => outcome !== "engine" && !isHit(outcome);
export const hitTokens = (tokens) => HITS.reduce((all, [tier]) => all + (tokens[tier] ?? 0), 0);
export const askedTokens = (tokens) => sum(tokens) - (tokens.engine ?? 0);

/** Hits among the tokens that were asked for; null where none was. */
export function hitRatio(tokens) {
  const asked = askedTokens(tokens);
  return asked > 0 ? hitTokens(tokens) / asked : null;
}

/** Misses that happened for a reason without a colour. */
export function otherReasons(tokens) {
  const hasColour = (outcome) => REASONS.some(([reason]) => reason === outcome);
  return Object.keys(tokens).filter((outcome) => isMiss(outcome) && tokens[outcome] && !hasColour(outcome));
}

/** What became of tokens, in the order in which it is drawn: [colour, what, tokens]. They sum up to all. */
export function parts(tokens) {
  const of = (outcomes) => sum(outcomes.map((outcome) => tokens[outcome] ?? 0));
  const found = [
    ["engine", "engine's own", of(["engine"])],
    ...HITS.map(([tier, words]) => [HIT_COLOURS[tier], `hit: ${words}`, of([tier])]),
    ...REASONS.map(([reason, colour]) => [colour, `missed: ${reason}`, of([reason])]),
    ["envelope", "missed: others", of(otherReasons(tokens))],
  ];
  return found.filter(([, , amount]) => amount > 0);
}

/** The cell of a bar of them, of which `most` tokens fill the whole. */
export function outcomesBar(tokens, most) {
  const pieces = parts(tokens).map(([colour, what, amount]) => [amount / most, colour, `${what}: ${count(amount)} tokens`]);
  return { kind: "bar", parts: pieces };
}

/** Tokens by outcome in a column of samples. */
export function tokensOf(column) {
  const found = {};
  for (const [sample, share] of column.parts) {
    for (const [outcome, tokens] of Object.entries(sample.tokens))
      found[outcome] = (found[outcome] ?? 0) + share * tokens;
  }
  return found;
}

/** How a span of so many seconds is called behind "the last". */
export function spanText(seconds) {
  return { 900: "15 min", 3600: "hour", 21600: "6 h" }[seconds];
}
