// What happened when: samples of some seconds each, put into the columns of a plot.
//
//   samples   ├────┤├────┤├────┤        ├────┤├────┤     each covers (from, to]
//   columns   │  ·  │  ·  │  ·  │ null │  ·  │  ·  │     of one width; null: nobody was there to count
//
// A sample may be shorter than a column (its amounts add up) or longer (minutes of the daemon's own: they are spread).

export const SAMPLES_MAX = 6000; // 6 h of 5 s are 4,320

/** All samples in the order of time, the newer list winning where both know something. */
export function merge(older, newer) {
  if (!newer.length) return older;
  const begins = newer[0].from;
  return [...older.filter((sample) => sample.to <= begins + 0.001), ...newer].slice(-SAMPLES_MAX);
}

/** `columns` columns of `step` seconds, the last one ending at `until`: [{at, seconds, parts}]. parts: [sample, its share]. */
export function columnsOf(samples, until, step, columns) {
  const begin = until - columns * step;
  const made = Array.from({ length: columns }, (_, n) => ({ from: begin + n * step, seconds: 0, parts: [] }));
  for (const sample of samples) {
    const length = sample.to - sample.from;
    if (sample.to <= begin || sample.from >= until || length <= 0) continue;
    const first = Math.max(0, Math.floor((sample.from - begin) / step));
    const last = Math.min(columns - 1, Math.floor((sample.to - begin) / step));
    for (let n = first; n <= last; n++) {
      const inside = Math.min(sample.to, made[n].from + step) - Math.max(sample.from, made[n].from);
      if (inside <= 1e-6) continue;
      made[n].seconds += inside;
      made[n].parts.push([sample, inside / length]);
    }
  }
  return made;
}

/** What all parts come to, `amount` being taken of each sample; null where there is no sample. */
export function total(column, amount) {
  if (!column.parts.length) return null;
  return column.parts.reduce((sum, [sample, share]) => sum + share * (amount(sample) ?? 0), 0);
}

/** The same for each second. */
export function rate(column, amount) {
  const sum = total(column, amount);
  return sum === null ? null : sum / column.seconds;
}

/** The largest of all parts; null where none has one. */
export function worst(column, figure) {
  const found = column.parts.map(([sample]) => figure(sample)).filter((value) => value !== null && value !== undefined);
  return found.length ? Math.max(...found) : null;
}

/** The middle of all parts; null where none has one. */
export function middle(column, figure) {
  const found = column.parts.map(([sample]) => figure(sample)).filter((value) => value !== null && value !== undefined);
  return found.length ? found.sort((a, b) => a - b)[Math.floor(found.length / 2)] : null;
}

/** One column of the last `seconds` before `until`. */
export function lately(samples, until, seconds) {
  return columnsOf(samples, until, seconds, 1)[0];
}
