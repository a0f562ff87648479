// Layers × heads as a map of one figure: pointed at, walked with the arrow keys, marked where far
// from the baseline. Holds drawing only; what the figures mean is docs/probes.md's.

import {count, percent, plural, significant} from "/words.js";

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 34, TOP = 18, LEAST = 4, MOST = 30;

// Figure → its words, how it is written; a share is drawn from 0 to 1, others up to the largest.
const FIGURES = {
  entropy: {words: "entropy, of the highest possible", share: true},
  sink: {words: "weight on the first token", share: true},
  band: {words: "weight within ±16 positions", share: true},
  context: {words: "keys, as if equally weighed", share: false},
  score: {words: "highest score", share: false},
};

function svg(tag, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  return node;
}

function el(tag, name, ...children) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  node.append(...children);
  return node;
}

const written = (value, share) => value === null ? "not known" : share ? percent(value, 1) : significant(value);

export class HeatMap {
  constructor() {
    this.drawing = svg("svg", {class: "heat", role: "img", tabindex: "0", "aria-label": "nothing is drawn yet"});
    this.said = el("output", "heat-said");
    this.said.id = "heat-said";
    this.drawing.setAttribute("aria-describedby", "heat-said");
    this.low = el("span"); this.high = el("span"); this.marks = el("span", "heat-marks");
    this.legend = el("p", "note heat-legend", this.low, el("i"), this.high, this.marks);
    this.box = el("div", "heat-box", this.drawing);
    this.note = el("p", "note");
    this.node = el("figure", "heat-figure", this.legend, this.box, this.said, this.note);
    this.at = null;
    this.drawn = "";
    this.drawing.addEventListener("pointermove", event => this.#point(event));
    this.drawing.addEventListener("pointerleave", () => this.#choose(null));
    this.drawing.addEventListener("blur", () => this.#choose(null));
    this.drawing.addEventListener("keydown", event => this.#walk(event));
  }

  draw(told, figure) {
    const width = this.node.clientWidth;
    const key = JSON.stringify([told.rows, figure, width, told.layers.length, told.seconds, told.id]);
    this.told = told;
    this.figure = figure;
    if (key === this.drawn || !width) return;
    this.drawn = key;
    const {layers, heads} = told, {share} = FIGURES[figure];
    const cell = Math.max(LEAST, Math.min(MOST, Math.floor((width - LEFT) / Math.max(1, heads.length))));
    const high = Math.max(6, Math.min(layers.length > 40 ? 9 : layers.length > 16 ? 13 : 20, cell));
    this.cell = {width: cell, height: high};
    const known = told[figure].flat().filter(value => value !== null);
    const least = share ? 0 : Math.min(...known, 0), most = share ? 1 : Math.max(...known, least + 1e-9);
    const wide = LEFT + cell * heads.length, tall = TOP + high * layers.length;
    this.drawing.setAttribute("viewBox", `0 0 ${wide + 1} ${tall + 1}`);
    this.drawing.setAttribute("width", wide + 1);
    this.drawing.setAttribute("height", tall + 1);
    const nodes = [];
    const everyHead = Math.ceil(22 / cell), everyLayer = Math.ceil(14 / high);
    heads.forEach((head, at) => {
      if (at % everyHead === 0) nodes.push(svg("text", {class: "tick", x: LEFT + cell * (at + .5), y: TOP - 6, "text-anchor": "middle"}, String(head)));
    });
    layers.forEach((layer, row) => {
      const y = TOP + high * row;
      if (row % everyLayer === 0) nodes.push(svg("text", {class: "tick", x: LEFT - 6, y: y + high / 2 + 4, "text-anchor": "end"}, String(layer)));
      heads.forEach((_, at) => {
        const value = told[figure][row][at], x = LEFT + cell * at;
        const box = {x: x + .5, y: y + .5, width: cell - 1, height: high - 1};
        if (value === null) nodes.push(svg("rect", {...box, class: "unknown"}));
        else {
          const rect = svg("rect", box);
          rect.style.setProperty("--share", `${(100 * (value - least) / (most - least)).toFixed(1)}%`);
          nodes.push(rect);
        }
        if (told.outside[row][at]) nodes.push(svg("path", {class: "outside", d: `M${x + 1.5} ${y + 1.5}h${cell - 3}v${high - 3}h${3 - cell}zl${cell - 3} ${high - 3}`}));
      });
    });
    this.cursor = svg("rect", {class: "cursor", width: cell, height: high, visibility: "hidden"});
    this.drawing.replaceChildren(...nodes, this.cursor);
    this.low.textContent = share ? "0%" : significant(least);
    this.high.textContent = `${share ? "100%" : significant(most)} ${FIGURES[figure].words}`;
    this.#tell();
  }

  #tell() {
    const {told, figure} = this;
    const outside = told.outside.flat().filter(Boolean).length;
    const judged = told.baseline ? `${outside ? plural(outside, "head is", "heads are") : "no head is"} further from the baseline of ${told.baseline.model} than requests differ by` : "";
    this.marks.textContent = told.baseline ? "crossed: far from the baseline" : "";
    const rows = told.rows ? `Of one in ${count(told.every)} steps, ${told.kept < told.rows ? `the last ${count(told.kept)} of ${count(told.rows)} rows` : `all ${plural(told.rows, "row")} so far`}.` : "No row was read so far.";
    const spent = told.seconds === null || !told.rows ? "" : ` Reading took ${significant(told.seconds)} s of processor time.`;
    this.note.textContent = `Layers downwards, heads across. ${rows}${spent}${judged ? ` ${judged[0].toUpperCase()}${judged.slice(1)}.` : " There is no baseline to hold it against."}`;
    this.drawing.setAttribute("aria-label", `${FIGURES[figure].words} of ${count(told.layers.length)} layers by ${count(told.heads.length)} heads${judged ? `; ${judged}` : ""}. Arrow keys walk it.`);
    if (this.at && (this.at[0] >= told.layers.length || this.at[1] >= told.heads.length)) this.at = null;
    this.#choose(this.at);
  }

  #point(event) {
    const box = this.drawing.getBoundingClientRect(), {width, height} = this.cell;
    const column = Math.floor((event.clientX - box.left - LEFT) / width), row = Math.floor((event.clientY - box.top - TOP) / height);
    this.#choose(row >= 0 && column >= 0 && row < this.told.layers.length && column < this.told.heads.length ? [row, column] : null);
  }

  #walk(event) {
    const step = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}[event.key];
    if (!step || !this.told?.layers.length) return;
    event.preventDefault();
    const [row, column] = this.at ?? [0, 0], {layers, heads} = this.told;
    this.#choose(this.at ? [Math.min(layers.length - 1, Math.max(0, row + step[0])), Math.min(heads.length - 1, Math.max(0, column + step[1]))] : [0, 0]);
  }

  #choose(at) {
    this.at = at;
    if (!this.cursor) return;
    this.cursor.setAttribute("visibility", at ? "visible" : "hidden");
    this.said.textContent = at ? this.#said(at) : this.told.layers.length ? "Point at a head, or walk with the arrow keys." : "";
    if (!at) return;
    this.cursor.setAttribute("x", LEFT + this.cell.width * at[1]);
    this.cursor.setAttribute("y", TOP + this.cell.height * at[0]);
  }

  #said([row, column]) {
    const {told} = this;
    const of = name => told[name][row][column];
    const parts = [
      `layer ${told.layers[row]} head ${told.heads[column]}: entropy ${written(of("entropy"), true)}`,
      of("nats") === null ? "" : `${significant(of("nats"))} nats`,
      of("context") === null ? "" : `as if over ${significant(of("context"))} keys`,
      `first token ${written(of("sink"), true)}`, `within ±16 ${written(of("band"), true)}`,
      `highest score ${written(of("score"), false)}`,
      of("usual") === null ? "" : `the baseline's prompts ${percent(of("usual"), 1)}${of("outside") ? ", further from it than requests differ by" : ""}`,
    ];
    return parts.filter(Boolean).join(" · ");
  }
}
