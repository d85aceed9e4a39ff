// Quantities as people read them: the words of kvstore/units.py, in the browser. A test compares the two.

export const NOTHING = "–"; // where a figure does not exist, as opposed to being 0
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/** Three digits, as Python's `.3g` for what occurs here: 1.50 -> "1.5". */
function digits(value) {
  if (value === 0) return "0";
  const text = Math.abs(value) >= 1000 ? value.toFixed(0) : value.toPrecision(3);
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}

/** 1536 -> "1.5 KiB". */
export function bytes(size) {
  for (const [unit, factor] of [
    ["TiB", 2 ** 40],
    ["GiB", 2 ** 30],
    ["MiB", 2 ** 20],
    ["KiB", 2 ** 10],
  ]) {
    if (Math.abs(size) >= factor) {
      const value = size / factor;
      return `${value < 1000 ? digits(value) : value.toFixed(0)} ${unit}`;
    }
  }
  return `${size.toFixed(0)} B`;
}

/** 1234567 -> "1,234,567". */
export function count(number) {
  return number.toFixed(0).replace(/\B(?=(\d{3})+$)/g, ",");
}

/** 1234567 -> "1.23 M". */
export function shortCount(number) {
  for (const [factor, unit] of [
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (Math.abs(number) >= 0.9995 * factor) return `${digits(number / factor)} ${unit}`;
  }
  return digits(number);
}

/** 0.1234 -> "12.3 %". Never rounds something to nothing, nor almost all to all. */
export function percent(ratio) {
  if (ratio === null || !Number.isFinite(ratio)) return NOTHING;
  if (ratio > 0 && ratio < 0.0005) return "<0.1 %";
  if (ratio >= 0.9995 && ratio < 1) return ">99.9 %";
  return `${(100 * ratio).toFixed(1)} %`;
}

/** In the unit that suits: "0.25 s", "12 min", "3.4 h", "5.1 days". */
export function duration(seconds) {
  if (seconds < 99.5) return `${digits(seconds)} s`;
  if (seconds < 99.5 * 60) return `${digits(seconds / 60)} min`;
  if (seconds < 48 * 3600) return `${digits(seconds / 3600)} h`;
  const days = seconds / 86400;
  return days < 100 ? `${digits(days)} days` : `${count(days)} days`;
}

/** How long one thing took: "170 µs", "2.4 ms", "1.3 s". */
export function latency(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return NOTHING;
  if (seconds < 1e-6) return "<1 µs";
  if (seconds < 0.9995e-3) return `${digits(seconds * 1e6)} µs`;
  if (seconds < 0.9995) return `${digits(seconds * 1e3)} ms`;
  return duration(seconds);
}

/** (1, "block") -> "1 block"; (1234, "block") -> "1,234 blocks". */
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** A point in time by the daemon's clock, in UTC as everywhere: "03:12", or with seconds "03:12:05". */
export function clock(unixSeconds, withSeconds = false) {
  return new Date(unixSeconds * 1000).toISOString().slice(11, withSeconds ? 19 : 16);
}

/** "21 Nov". */
export function day(unixSeconds) {
  const at = new Date(unixSeconds * 1000);
  return `${at.getUTCDate()} ${MONTHS[at.getUTCMonth()]}`;
}

/** "21 Nov 2026 15:00". */
export function moment(unixSeconds) {
  return `${day(unixSeconds)} ${new Date(unixSeconds * 1000).getUTCFullYear()} ${clock(unixSeconds)}`;
}

/** 12.3456 -> "12.35 EUR"; below 1 at least two digits that count, large amounts without a fraction. */
export function money(amount, currency) {
  if (amount === null) return NOTHING;
  if (Math.abs(amount) >= 1000) return `${count(amount)} ${currency}`;
  const digits = amount ? 1 - Math.floor(Math.log10(Math.abs(amount))) : 0;
  return `${amount.toFixed(Math.max(2, digits))} ${currency}`;
}

/** What a client chose as a name, without what could turn or blank the line that it stands in. */
export function printable(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, "\ufffd");
}
