// What became of tokens, in the words and colours of this page. The names are those of kvstore/protocol/outcomes.py.

export const HITS = [
  ["dram", "DRAM"],
  ["nvme", "NVMe"],
  ["shared", "bucket"],
  ["read_through", "other region"],
];
export const HIT_COLOURS = { dram: "dram", nvme: "nvme", shared: "shared", read_through: "ref6" };
export const TIERS = Object.fromEntries(HITS);

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
