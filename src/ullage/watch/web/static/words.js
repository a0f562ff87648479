// Numbers, units and times as people read them: what pages/words.py says in Python, said here.
// Holds formatting only. Byte units are decimal.

const BYTES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
const COUNTS = [[1e12, "T"], [1e9, "B"], [1e6, "M"]];
const MINUS = "−";

// toFixed rounds the number that is there, as Python does; toLocaleString its shortest decimal.
function grouped(value, places) {
  const [whole, rest] = value.toFixed(places).split(".");
  return whole.replace(/\B(?=(\d{3})+$)/g, ",") + (rest ? `.${rest}` : "");
}

export function significant(value, digits = 3) {
  if (value === 0) return "0";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : MINUS + "∞";
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))));
  return (value < 0 ? MINUS : "") + grouped(Math.abs(value), Math.min(places, 20));
}

function withUnit(value, units, digits = 3) {
  for (const [size, unit] of units) {
    if (Math.abs(value) >= size) return `${significant(value / size, digits)} ${unit}`;
  }
  return `${significant(value, digits)} ${units[units.length - 1][1]}`;
}

export function byteSize(value, digits = 3) {
  return withUnit(value, BYTES, digits);
}

export function seconds(value, digits = 3) {
  if (value === Infinity) return "no bound";
  if (Math.abs(value) >= 1 || value === 0) return `${significant(value, digits)} s`;
  if (Math.abs(value) >= 1e-3) return `${significant(value * 1e3, digits)} ms`;
  return `${significant(value * 1e6, digits)} µs`;
}

export function count(value) {
  return (value < 0 ? MINUS : "") + grouped(Math.abs(value), 0);
}

export function largeCount(value) {
  return Math.abs(value) >= 1e6 ? withUnit(value, COUNTS) : count(value);
}

export function percent(ratio, digits = 0) {
  return `${(ratio * 100).toFixed(digits).replace("-", MINUS)}%`;
}

// One number with its unit.
export function quantity(value, unit) {
  switch (unit) {
    case "bytes": return byteSize(value);
    case "s": return seconds(value);
    case "ratio": return percent(value, 1);
    case "tokens/s": return `${significant(value)} tokens/s`;
    case "1/s": return `${significant(value)}/s`;
    case "tokens": return `${largeCount(value)} tokens`;
    case "requests": return Number.isInteger(value) ? count(value) : significant(value);
    case "": return Number.isInteger(value) ? count(value) : significant(value);
    default: return `${Number.isInteger(value) ? count(value) : significant(value)} ${unit}`;
  }
}

// A tick of an axis: as short as can be.
export function tick(value, unit) {
  if (unit === "ratio") return percent(value);
  if (unit === "bytes") return value === 0 ? "0" : shorter(byteSize(value));
  if (unit === "s") return value === 0 ? "0" : shorter(seconds(value));
  return value === 0 ? "0" : shorter(Math.abs(value) >= 1e4 ? withUnit(value, [...COUNTS, [1e3, "k"]]) : significant(value));
}

function shorter(text) {
  return text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
}

export function end(value) {
  return value === "inf" ? Infinity : value;
}

// "250 to 500 ms", with the unit once where both ends have the same.
export function range(low, high, unit) {
  if (high === Infinity) return `above ${shorter(quantity(low, unit))}`;
  const one = shorter(quantity(low, unit)), two = shorter(quantity(high, unit));
  const at = one.lastIndexOf(" "), last = two.lastIndexOf(" ");
  if (low === 0) return `up to ${two}`;
  return at > 0 && one.slice(at) === two.slice(last) ? `${one.slice(0, at)} to ${two}` : `${one} to ${two}`;
}

// How long something lasts, in the two largest units.
export function duration(s) {
  const whole = Math.max(0, Math.round(s));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min${whole < 600 && whole % 60 ? ` ${whole % 60} s` : ""}`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor(whole % 3600 / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor(whole % 86400 / 3600)} h`;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", {hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23"});
const SHORT_CLOCK = new Intl.DateTimeFormat("en-GB", {hour: "2-digit", minute: "2-digit", hourCycle: "h23"});
const DAY = new Intl.DateTimeFormat("en-GB", {day: "numeric", month: "short"});

export function clock(timeS) {
  return CLOCK.format(timeS * 1000);
}

export function shortClock(timeS) {
  return SHORT_CLOCK.format(timeS * 1000);
}

// The clock, with the day where it is not today's.
export function moment(timeS, nowS) {
  const day = DAY.format(timeS * 1000);
  return day === DAY.format(nowS * 1000) ? clock(timeS) : `${day}, ${clock(timeS)}`;
}

export function plural(num, one, many = `${one}s`) {
  return `${count(num)} ${num === 1 ? one : many}`;
}
