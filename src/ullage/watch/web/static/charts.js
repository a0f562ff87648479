// Charts over time as SVG: lines, bands between bounds, a shared moment, incidents and changes.
// Holds drawing only; what the columns are is the server's series. Colours are the style's classes.

import {clock, end, quantity, range, shortClock, tick} from "/words.js";

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 58, RIGHT = 12, TOP = 8, HEIGHT = 178, BOTTOM = 24;

// Each line: column, its words, class. `band`: the columns of its bounds. `instead`: drawn where the
// column before it is not known.
export const CHARTS = [
  {name: "kv", title: "KV cache", unit: "bytes", lines: [
    {column: "kv_used_bytes", words: "used", kind: "measured", fill: true},
    {column: "kv_total_bytes", words: "in all", kind: "roof"}],
   instead: {unit: "ratio", lines: [{column: "kv_used_ratio", words: "used", kind: "measured", fill: true}]}},
  {name: "requests", title: "Requests", unit: "requests", lines: [
    {column: "running", words: "running", kind: "measured"},
    {column: "waiting", words: "waiting", kind: "waiting"},
    {column: "waiting_deferred", words: "of them deferred", kind: "predicted"}]},
  {name: "preemptions", title: "Preemptions", unit: "1/s", lines: [
    {column: "preemptions_per_s", words: "per second", kind: "measured", fill: true}]},
  {name: "ttft", title: "Time to first token", unit: "s", log: true, lines: [
    {column: "ttft_p99_s", words: "p99", kind: "measured", band: ["ttft_p99_low_s", "ttft_p99_high_s"]},
    {column: "ttft_p50_s", words: "p50", kind: "slate", band: ["ttft_p50_low_s", "ttft_p50_high_s"]}]},
  {name: "itl", title: "Time between tokens", unit: "s", log: true, lines: [
    {column: "itl_p99_s", words: "p99", kind: "measured", band: ["itl_p99_low_s", "itl_p99_high_s"]},
    {column: "itl_p50_s", words: "p50", kind: "slate", band: ["itl_p50_low_s", "itl_p50_high_s"]}]},
  {name: "prefix", title: "Prefix cache hits", unit: "ratio", lines: [
    {column: "prefix_hit_ratio", words: "of the tokens looked up", kind: "measured", fill: true}]},
  {name: "tokens", title: "Tokens per second", unit: "tokens/s", lines: [
    {column: "prompt_tokens_per_s", words: "read", kind: "slate"},
    {column: "generation_tokens_per_s", words: "written", kind: "measured"}]},
  {name: "gpu", title: "GPU busy", unit: "ratio", optional: true, lines: [
    {column: "gpu_busy_ratio", words: "mean", kind: "measured", fill: true}]},
];

function svg(tag, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  return node;
}

// The rows of one subject, by column, and what is asked of them.
export class History {
  constructor() {
    this.columns = new Map();
    this.times = [];
    this.rows = [];
    this.absent = {};
    this.partial = {};
  }

  add(told) {
    this.columns = new Map(told.columns.map((name, i) => [name, i]));
    this.absent = told.absent;
    this.partial = told.partial;
    for (let i = 0; i < told.times.length; i += 1) {
      if (this.times.length && told.times[i] <= this.times[this.times.length - 1]) continue;
      this.times.push(told.times[i]);
      this.rows.push(told.rows[i]);
    }
    const many = this.times.length - 4000;
    if (many > 0) {
      this.times.splice(0, many);
      this.rows.splice(0, many);
    }
  }

  get last() {
    return this.times.length ? this.times[this.times.length - 1] : 0;
  }

  // The index of the first row at or after a time.
  from(timeS) {
    let low = 0, high = this.times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.times[middle] < timeS) low = middle + 1; else high = middle;
    }
    return low;
  }

  value(i, column) {
    const at = this.columns.get(column);
    return at === undefined || !this.rows[i] ? null : end(this.rows[i][at]);
  }

  knows(column, first) {
    for (let i = first; i < this.times.length; i += 1) {
      if (this.value(i, column) !== null) return true;
    }
    return false;
  }
}

function linearTicks(top, wanted) {
  const rough = top / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(m => m * power).find(s => s >= rough * 0.999);
  const out = [];
  for (let i = 0; i * step <= top * (1 + 1e-9); i += 1) out.push(i * step);
  if (out[out.length - 1] < top * (1 - 1e-9)) out.push(out.length * step);
  return out;
}

function logTicks(low, high) {
  const few = Math.log10(high / low) < 2 ? [1, 2, 5] : [1];
  const out = [];
  for (let p = Math.floor(Math.log10(low)) - 1; p <= Math.ceil(Math.log10(high)); p += 1) {
    for (const m of few) {
      const at = m * 10 ** p;
      if (at >= low * 0.999 && at <= high * 1.001) out.push(at);
    }
  }
  return out;
}

const TIME_STEPS = [10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600];

function timeTicks(fromS, untilS, most) {
  const step = TIME_STEPS.find(s => (untilS - fromS) / s <= most) ?? 43200;
  const zone = new Date(untilS * 1000).getTimezoneOffset() * 60;
  const out = [];
  for (let at = Math.ceil((fromS - zone) / step) * step + zone; at <= untilS; at += step) out.push(at);
  return out;
}

function scaleOf(spec, values) {
  if (spec.unit === "ratio") return {low: 0, high: 1, log: false, ticks: [0, 0.25, 0.5, 0.75, 1]};
  const largest = Math.max(0, ...values.filter(v => v !== null && Number.isFinite(v)));
  if (!spec.log) {
    const floor = spec.unit === "requests" ? 4 : spec.unit === "1/s" ? 1 : 0;
    const ticks = linearTicks(Math.max(largest, floor) || 1, 4);
    return {low: 0, high: ticks[ticks.length - 1], log: false, ticks};
  }
  const positive = values.filter(v => v > 0 && Number.isFinite(v));
  if (!positive.length) return {low: 1e-3, high: 1, log: true, ticks: logTicks(1e-3, 1)};
  let low = Math.min(...positive) / 1.5, high = Math.max(...positive) * 1.5;
  if (high / low < 10) { const mean = Math.sqrt(low * high); low = mean / 3.2; high = mean * 3.2; }
  return {low, high, log: true, ticks: logTicks(low, high)};
}

// Runs of rows where the columns are known: a gap in what is known is a gap in the line.
function runs(history, first, columns) {
  const out = [];
  let run = null;
  for (let i = first; i < history.times.length; i += 1) {
    const values = columns.map(c => history.value(i, c));
    if (values.some(v => v === null)) { run = null; continue; }
    if (!run) out.push(run = []);
    run.push([history.times[i], ...values]);
  }
  return out;
}

const fixed = number => number.toFixed(1);

// One chart: a heading that names the lines with their values at the moment, and the drawing.
export class Chart {
  constructor(spec, onPoint) {
    this.spec = spec;
    this.node = document.createElement("figure");
    this.node.id = `chart-${spec.name}`;
    const caption = document.createElement("figcaption");
    const title = document.createElement("b");
    title.textContent = spec.title;
    this.legend = document.createElement("span");
    this.legend.className = "legend";
    caption.append(title, this.legend);
    this.drawing = svg("svg", {role: "img"});
    this.node.append(caption, this.drawing);
    const point = event => {
      if (!this.frame) return;
      const box = this.drawing.getBoundingClientRect();
      const share = ((event.clientX - box.left) - LEFT) / (this.frame.right - LEFT);
      onPoint(share < -0.05 || share > 1.05 ? null : this.frame.fromS + share * (this.frame.untilS - this.frame.fromS));
    };
    this.drawing.addEventListener("pointermove", point);
    this.drawing.addEventListener("pointerdown", point);
    this.drawing.addEventListener("pointerleave", () => onPoint(null));
  }

  // `marks`: {incidents: [{from, until, severity}], changes: [time]}. `at`: the row of the moment.
  draw(history, fromS, untilS, at, marks) {
    const first = history.from(fromS);
    const full = this.spec;
    const spec = full.instead && !history.knows(full.lines[0].column, first) ? {...full, ...full.instead} : full;
    const lines = spec.lines.filter(line => history.knows(line.column, first));
    this.node.hidden = Boolean(full.optional) && !lines.length;
    if (this.node.hidden) return;
    this.drawing.replaceChildren();
    this.node.classList.toggle("nothing", !lines.length);
    if (!lines.length) {
      const reason = history.absent[full.lines[0].column];
      this.legend.textContent = history.times.length ? `not known: ${reason || "nothing was observed in this span"}` : "no round yet";
      this.drawing.setAttribute("aria-label", `${full.title}: ${this.legend.textContent}`);
      this.drawing.setAttribute("viewBox", "0 0 10 1");
      this.frame = null;
      return;
    }
    const width = Math.max(240, this.node.clientWidth);
    const right = width - RIGHT, bottom = HEIGHT - BOTTOM;
    const values = [];
    for (let i = first; i < history.times.length; i += 1) {
      for (const line of lines) for (const c of [line.column, ...(line.band ?? [])]) values.push(history.value(i, c));
    }
    const scale = scaleOf(spec, values);
    const x = t => LEFT + (t - fromS) / (untilS - fromS) * (right - LEFT);
    const y = v => {
      const share = scale.log
        ? Math.log(Math.max(v, scale.low) / scale.low) / Math.log(scale.high / scale.low)
        : (v - scale.low) / (scale.high - scale.low);
      return bottom + (TOP - bottom) * Math.min(1, Math.max(0, share));
    };
    this.frame = {fromS, untilS, right};
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.drawing.setAttribute("width", width);
    this.drawing.setAttribute("height", HEIGHT);
    const put = node => this.drawing.append(node);
    for (const value of scale.ticks) {
      put(svg("line", {x1: LEFT, x2: right, y1: fixed(y(value)), y2: fixed(y(value)), class: "grid"}));
      put(svg("text", {x: LEFT - 7, y: fixed(y(value) + 4), "text-anchor": "end", class: "tick"}, tick(value, spec.unit)));
    }
    put(svg("line", {x1: LEFT, x2: right, y1: bottom, y2: bottom, class: "base"}));
    for (const t of timeTicks(fromS, untilS, Math.floor((right - LEFT) / 70))) {
      put(svg("line", {x1: fixed(x(t)), x2: fixed(x(t)), y1: bottom, y2: bottom + 4, class: "base"}));
      if (x(t) < right - 14 && x(t) > LEFT + 4) put(svg("text", {x: fixed(x(t)), y: bottom + 17, "text-anchor": "middle", class: "tick"}, untilS - fromS < 300 ? clock(t) : shortClock(t)));
    }
    for (const {from, until, severity} of marks.incidents) {
      const a = Math.max(LEFT, x(from)), b = Math.min(right, x(until ?? untilS));
      if (b >= LEFT && a <= right) put(svg("line", {x1: fixed(a), x2: fixed(Math.max(b, a + 2)), y1: bottom, y2: bottom, class: `incident ${severity}`}));
    }
    for (const t of marks.changes) {
      if (t >= fromS && t <= untilS) put(svg("line", {x1: fixed(x(t)), x2: fixed(x(t)), y1: TOP, y2: bottom, class: "change"}));
    }
    for (const line of lines) this.#line(line, history, first, x, y, bottom, put);
    this.#moment(spec, lines, history, at, x, y, bottom, put);
  }

  #line(line, history, first, x, y, bottom, put) {
    if (line.band) {
      for (const run of runs(history, first, line.band)) {
        const upper = run.map(([t, , high]) => `${fixed(x(t))},${fixed(y(high))}`);
        const lower = run.map(([t, low]) => `${fixed(x(t))},${fixed(y(low))}`).reverse();
        put(svg("polygon", {points: [...upper, ...lower].join(" "), class: `band ${line.kind}`}));
      }
    }
    for (const run of runs(history, first, [line.column])) {
      const points = run.map(([t, v]) => `${fixed(x(t))},${fixed(y(v))}`);
      if (line.fill && points.length > 1) {
        const ends = [`${fixed(x(run[run.length - 1][0]))},${bottom}`, `${fixed(x(run[0][0]))},${bottom}`];
        put(svg("polygon", {points: [...points, ...ends].join(" "), class: "filled"}));
      }
      if (points.length === 1) put(svg("circle", {cx: points[0].split(",")[0], cy: points[0].split(",")[1], r: 2, class: `dot ${line.kind}`}));
      else put(svg("polyline", {points: points.join(" "), class: line.kind}));
    }
  }

  #moment(spec, lines, history, at, x, y, bottom, put) {
    const i = at ?? history.times.length - 1;
    const said = [];
    this.legend.replaceChildren();
    for (const line of lines) {
      const value = history.value(i, line.column);
      const bounds = line.band?.map(c => history.value(i, c));
      const shown = value === null ? "not known"
        : bounds && bounds[0] !== null ? range(bounds[0], bounds[1], spec.unit) : quantity(value, spec.unit);
      const item = document.createElement("span");
      item.className = `item ${line.kind}`;
      item.textContent = `${line.words} ${shown}`;
      this.legend.append(item);
      said.push(item.textContent);
      if (at !== null && value !== null) put(svg("circle", {cx: fixed(x(history.times[i])), cy: fixed(y(value)), r: 3, class: `dot ${line.kind}`}));
    }
    const few = lines.map(line => history.partial[line.column]).find(Boolean);
    if (few && at === null) {
      const note = document.createElement("span");
      note.textContent = `${few[0]} of ${few[1]} replicas tell it`;
      this.legend.append(note);
      said.push(note.textContent);
    }
    if (at !== null) put(svg("line", {x1: fixed(x(history.times[i])), x2: fixed(x(history.times[i])), y1: TOP, y2: bottom, class: "moment"}));
    this.drawing.setAttribute("aria-label", `${spec.title} at ${clock(history.times[i])}: ${said.join(", ")}`);
  }
}
