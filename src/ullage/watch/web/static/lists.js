// Lists that stay in place while they change: incidents, replicas, one replica, rules.
// Every element is built from text, none from markup, so a name is never more than a name.

import {duration, end, moment, percent, plural, quantity, range, byteSize, seconds, count} from "/words.js";

export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Make `parent` hold one child per item, kept by key, so that focus, selection and open details stay.
export function sync(parent, items, key, create, update) {
  const old = new Map([...parent.children].map(child => [child.dataset.key, child]));
  const seen = new Set();
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    if (seen.has(name)) continue;
    seen.add(name);
    let child = old.get(name);
    if (child) old.delete(name);
    else {
      child = create(item);
      child.dataset.key = name;
    }
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  for (const child of old.values()) child.remove();
}

// Replace the children only when what they are made of differs.
export function redraw(parent, data, draw) {
  const text = JSON.stringify(data);
  if (parent.dataset.of === text) return;
  parent.dataset.of = text;
  parent.replaceChildren(...draw(data));
}

const NOT_KNOWN = "–";

// A figure's text; where it is not known a dash that tells its reason when pointed at or focused.
export function showFigure(node, figure, shown = figureText) {
  if (figure.absent === undefined) {
    setText(node, shown(figure));
    node.classList.remove("absent");
    node.removeAttribute("tabindex");
    node.removeAttribute("aria-label");
    const few = figure.num !== undefined && figure.num < figure.of ? `of ${figure.num} of the ${figure.of} that answer` : "";
    explain(node, [figure.source, figure.approximate ? "approximate" : "", few].filter(Boolean).join("; "));
    return;
  }
  setText(node, NOT_KNOWN);
  node.classList.add("absent");
  node.setAttribute("tabindex", "0");
  node.setAttribute("aria-label", `not known: ${figure.absent}`);
  explain(node, `not known: ${figure.absent}`);
}

function explain(node, why) {
  if (why) node.dataset.why = why; else delete node.dataset.why;
}

export function figureText(figure) {
  if (figure.low !== undefined) {
    if (figure.low === figure.high) return figure.low >= 120 && figure.unit === "s" ? duration(figure.low) : quantity(end(figure.low), figure.unit);
    return range(end(figure.low), end(figure.high), figure.unit);
  }
  if (figure.value === null) return NOT_KNOWN;
  if (figure.unit === "s" && figure.value >= 120) return duration(figure.value);
  return quantity(figure.value, figure.unit);
}

const STATE_WORDS = {
  unreachable: "does not answer", error: "error", warning: "warning", info: "for information",
  unknown: "nothing could be evaluated", clear: "nothing fired",
};

// ---- replicas

export function replicaRow(onChoose) {
  return row => {
    const choose = el("button", {type: "button", class: "name"});
    choose.addEventListener("click", () => onChoose(row.id));
    const cell = (name, label) => el("td", {class: `n ${name}`, "data-label": label}, el("span"));
    return el("tr", {},
      el("td", {class: "who"}, choose, el("span", {class: "standing"}), el("span", {class: "source"})),
      el("td", {class: "filling"}, el("div", {class: "bar-text"}, el("span"), el("span", {class: "source"})), el("div", {class: "bar"}, el("i"))),
      cell("running", "running"), cell("waiting", "waiting"), cell("preemptions", "preempted"),
      cell("ttft", "TTFT, p99"), cell("itl", "ITL, p99"));
  };
}

export function updateReplicaRow(node, row, chosen) {
  node.dataset.state = row.state;
  node.classList.toggle("chosen", row.id === chosen);
  const [choose, state, who] = node.querySelector(".who").children;
  setText(choose, row.name);
  choose.setAttribute("aria-pressed", String(row.id === chosen));
  setText(state, stateText(row));
  state.className = `standing ${row.state}`;
  setText(who, [...row.models, [row.engine, row.version].filter(Boolean).join(" ")].filter(Boolean).join(" · "));
  const f = row.figures;
  const [text, bytes] = node.querySelector(".bar-text").children;
  showFigure(text, f.kv_used_ratio, figure => shareText(figure.value));
  setText(bytes, f.kv_used_bytes.absent === undefined && f.kv_total_bytes.absent === undefined
    ? `${byteSize(f.kv_used_bytes.value)} of ${byteSize(f.kv_total_bytes.value)}` : "");
  const bar = node.querySelector(".bar");
  bar.classList.toggle("unknown", f.kv_used_ratio.absent !== undefined);
  const ratio = f.kv_used_ratio.absent === undefined ? Math.min(1, Math.max(0, f.kv_used_ratio.value)) : 0;
  bar.firstElementChild.style.width = `${ratio * 100}%`;
  bar.firstElementChild.className = ratio > 0.95 ? "over" : "";
  const put = (name, figure, shown) => showFigure(node.querySelector(`.${name} span`), figure, shown);
  put("running", f.running);
  put("waiting", f.waiting, figure => waitingText(figure, row.waiting_by_reason));
  put("preemptions", f.preemptions_per_s);
  put("ttft", f.ttft_p99_s);
  put("itl", f.itl_p99_s);
}

// Not quite full is not shown as full.
function shareText(ratio) {
  return percent(ratio, ratio > 0.99 && ratio < 1 ? 1 : 0);
}

function stateText(row) {
  if (row.state === "unreachable") return row.error ? `does not answer: ${row.error}` : "was not asked yet";
  if (row.state === "clear") return `nothing fired; ${row.evaluated} of ${row.rules} rules evaluated`;
  if (row.state === "unknown" && !row.rules) return "no rules yet";
  return row.fired.length ? `${STATE_WORDS[row.state]}: ${row.fired.join(", ")}` : STATE_WORDS[row.state];
}

function waitingText(figure, reasons) {
  const deferred = reasons.deferred ?? 0;
  return deferred > 0 ? `${quantity(figure.value, "requests")} (${quantity(deferred, "requests")} deferred)` : quantity(figure.value, "requests");
}

// ---- incidents

export function incidentNode(onChoose) {
  return incident => {
    const where = incident.replica ? el("button", {type: "button", class: "name"}) : el("span", {class: "name"});
    if (incident.replica) where.addEventListener("click", () => onChoose(incident.replica));
    return el("article", {class: "finding"},
      el("h3", {}, el("span", {class: "tag"}), el("span", {class: "what"})),
      el("p", {class: "when"}, where, el("span", {class: "since"})),
      el("p", {class: "standing"}),
      el("p", {class: "cause"}), el("p", {class: "remedy"}),
      el("div", {class: "changed"}),
      el("details", {}, el("summary", {text: "Evidence"}), el("ul", {class: "evidence"})));
  };
}

export function updateIncident(node, incident, nowS) {
  const [tag, what] = node.querySelector("h3").children;
  setText(tag, incident.severity);
  tag.className = `tag ${incident.severity}`;
  setText(what, `${incident.id}  ${incident.title}`);
  const [where, since] = node.querySelector(".when").children;
  setText(where, incident.replica ? incident.name : "all replicas together");
  const until = incident.until_s;
  setText(since, until === null
    ? ` since ${moment(incident.since_s, nowS)}, for ${duration(nowS - incident.since_s)}`
    : ` from ${moment(incident.since_s, nowS)} to ${moment(until, nowS)}, ${duration(until - incident.since_s)}`);
  setText(node.querySelector(".standing"), until === null ? standing(incident) : "");
  setText(node.querySelector(".cause"), incident.cause);
  setText(node.querySelector(".remedy"), incident.remedy ? `→ ${incident.remedy}` : "");
  redraw(node.querySelector(".changed"), [incident.changed, incident.since_s], ([changed, began]) => {
    // A cause may be seen a scrape late; but what came after is not said to have come before.
    const later = changed.filter(change => change.time_s - began >= 1);
    const told = (label, changes) => changes.length
      ? [el("p", {class: "label", text: label}), el("ul", {}, ...changes.map(change => changeItem(change, began)))]
      : [];
    const before = told("What changed shortly before", changed.filter(change => !later.includes(change)));
    return [
      ...before.length ? before : [el("p", {class: "source", text: "Nothing was seen to change shortly before it began."})],
      ...told("Seen to change after it began", later),
    ];
  });
  const details = node.querySelector("details");
  details.hidden = !incident.evidence.length;
  redraw(details.querySelector("ul"), incident.evidence, evidence => evidence.map(evidenceItem));
}

// An incident goes on while it is not known to be over; what it said last is then not what is.
function standing(incident) {
  if (incident.now === "fired") return "";
  if (incident.now === "clear") return "Clear just now; it is over when it stays so.";
  return `It cannot be evaluated now${incident.lacks.length ? `, for lack of ${incident.lacks.join("; ")}` : ""}: what follows is what was found last.`;
}

function changeItem(change, began) {
  const before = began - change.time_s;
  const when = Math.abs(before) < 1 ? "as it began" : before > 0 ? `${duration(before)} before` : `${duration(-before)} after it began`;
  return el("li", {}, el("b", {text: change.what}), ` ${change.before || "nothing"} → ${change.after || "nothing"}, `, el("span", {class: "source", text: when}));
}

function evidenceItem(evidence) {
  const item = el("li", {}, el("b", {text: evidence.name}), ` ${evidenceText(evidence)} `);
  if (evidence.source) item.append(el("span", {class: "source", text: evidence.source}));
  return item;
}

function evidenceText({value, unit}) {
  if (value === null) return "not known";
  if (typeof value === "number") return unit === "%" ? `${value}%` : quantity(value, unit);
  return unit ? `${value} ${unit}` : String(value);
}

// ---- one replica

function pairs(items) {
  return items.map(([name, value]) => el("tr", {}, el("th", {scope: "row", text: name}), el("td", {text: value})));
}

export function showReplica(told, nowS) {
  const at = id => document.getElementById(id);
  setText(at("replica-title"), told.name);
  const error = at("replica-error");
  error.hidden = told.state !== "unreachable";
  const last = told.answered_s === null ? "It never answered." : `Its last answer was at ${moment(told.answered_s, nowS)}; what it said then is not shown as now.`;
  setText(error, told.error ? `${told.error}. ${last}` : last);
  redraw(at("figures"), told.figures, figures => figures.map(figure => {
    const value = el("td", {class: "n", text: figureText(figure)});
    const source = (figure.approximate ? "about; " : "") + figure.source;
    return el("tr", {}, el("td", {text: figure.words}), value, el("td", {class: "from"}, el("span", {class: "source", text: source})));
  }));
  redraw(at("absent"), told.absent, absent => absent.length
    ? absent.map(({reason, what}) => el("li", {}, el("b", {text: what.join(", ")}), ` ${reason}`))
    : [el("li", {text: "It tells everything that is looked for."})]);
  redraw(at("identity"), identityRows(told, nowS), pairs);
  at("gpus-part").hidden = !told.gpus.length;
  redraw(at("gpus"), told.gpus, gpus => pairs(gpus.map(gpu => [`${gpu.index} ${gpu.name}`.trim(), gpuText(gpu)])));
  redraw(at("changes"), [told.changes, nowS - nowS % 30], ([changes]) => changes.length
    ? changes.map(c => el("li", {}, el("b", {text: c.what}), ` ${c.before || "nothing"} → ${c.after || "nothing"} `, el("span", {class: "source", text: moment(c.time_s, nowS)})))
    : [el("li", {text: "Nothing was seen to change."})]);
  const order = ["fired", "clear", "not_evaluable"];
  const sorted = [...told.findings].sort((a, b) => order.indexOf(a.state) - order.indexOf(b.state) || (a.id < b.id ? -1 : 1));
  redraw(at("findings"), sorted, findings => findings.length ? findings.map(ruleItem) : [el("li", {text: "No rule has been asked."})]);
  at("settings-part").hidden = !told.settings.length;
  redraw(at("settings"), told.settings, pairs);
}

function identityRows(told, nowS) {
  const who = told.identity;
  const rows = [
    ["engine", [who.engine, who.version].filter(Boolean).join(" ") || "it does not say"],
    ["model", who.models.join(", ") || "it does not say"],
  ];
  if (who.adapters.length) rows.push(["adapters", who.adapters.join(", ") + (who.num_adapters > who.adapters.length ? ` and ${who.num_adapters - who.adapters.length} more` : "")]);
  if (who.max_model_len !== null) rows.push(["longest request", `${count(who.max_model_len)} tokens`]);
  if (who.num_blocks !== null) rows.push(["blocks", who.block_size === null ? count(who.num_blocks) : `${count(who.num_blocks)} of ${count(who.block_size)} tokens`]);
  if (who.num_engines > 1) rows.push(["engines behind it", count(who.num_engines)]);
  if (who.started_s !== null) rows.push(["started", moment(who.started_s, nowS)]);
  for (const [name, value] of told.pod) rows.push([`pod: ${name}`, value]);
  return rows;
}

function gpuText(gpu) {
  const said = [];
  if (gpu.busy_ratio !== null) said.push(`${percent(gpu.busy_ratio)} busy`);
  if (gpu.used_bytes !== null) said.push(byteSize(gpu.used_bytes) + (gpu.total_bytes === null ? "" : ` of ${byteSize(gpu.total_bytes)}`));
  if (gpu.sm_clock_hz !== null) said.push(`${(gpu.sm_clock_hz / 1e6).toFixed(0)} MHz` + (gpu.max_sm_clock_hz === null ? "" : ` of ${(gpu.max_sm_clock_hz / 1e6).toFixed(0)}`));
  if (gpu.power_watts !== null) said.push(`${gpu.power_watts.toFixed(0)} W`);
  if (gpu.temperature_celsius !== null) said.push(`${gpu.temperature_celsius.toFixed(0)} °C`);
  if (gpu.throttled_because.length) said.push(`slowed: ${gpu.throttled_because.join(", ")}`);
  if (gpu.xid_errors) said.push(`last Xid ${gpu.xid_errors}`);
  return said.join(" · ") || "it does not say";
}

// Where a finding of the engine's own probe is; "" of the watcher's.
function placeText({kind, layers, heads}) {
  if (kind === undefined) return "";
  const shown = layers.slice(0, 8).join(", ") + (layers.length > 8 ? ", …" : "");
  const where = layers.length ? `${layers.length === 1 ? "layer" : "layers"} ${shown}` : "outside of the layers";
  const of = heads.length ? `, ${heads.length === 1 ? "head" : "heads"} ${heads.slice(0, 8).join(", ")}${heads.length > 8 ? ", …" : ""}` : "";
  return `${kind}, ${where}${of}`;
}

export function firedItem(finding) {
  return el("li", {}, el("span", {class: `tag ${finding.severity}`, text: finding.severity}),
    el("b", {text: `${finding.id} ${finding.title}: ${placeText(finding)}`}), ` ${finding.cause} → ${finding.remedy}`);
}

function ruleItem(finding) {
  const fired = finding.state === "fired";
  const state = fired ? finding.severity : finding.state === "clear" ? "clear" : "not evaluable";
  const item = el("li", {}, el("span", {class: `tag ${fired ? finding.severity : finding.state}`, text: state}), el("b", {text: `${finding.id} ${finding.title}`}));
  if (fired) item.append(` ${[placeText(finding), finding.cause].filter(Boolean).join(": ")}`);
  if (finding.missing.length) item.append(el("span", {class: "source", text: ` lacks ${finding.missing.join("; ")}`}));
  return item;
}

// ---- rules

export function ruleRow() {
  return el("tr", {}, el("td"), ...["fired", "clear", "not evaluable"].map(label => el("td", {class: "n", "data-label": label})), el("td", {class: "from"}, el("span", {class: "source"})));
}

export function updateRuleRow(node, rule) {
  const [title, fired, clear, not, missing] = node.children;
  setText(title, `${rule.id}  ${rule.title}`);
  setText(fired, count(rule.fired));
  fired.classList.toggle("none", !rule.fired);
  node.dataset.fired = rule.fired ? rule.severity : "";
  setText(clear, count(rule.clear));
  setText(not, count(rule.not_evaluable));
  setText(missing.firstChild, rule.missing.map(([what, num]) => rule.not_evaluable > 1 ? `${what} (${count(num)})` : what).join("; "));
}

// ---- the fleet

const KEYS = [
  ["kv_used_ratio", "KV cache used"], ["kv_free_bytes", "KV cache free"], ["running", "running"],
  ["waiting", "waiting"], ["preemptions_per_s", "preemptions"], ["generation_tokens_per_s", "written"],
  ["ttft_p99_s", "TTFT, p99"], ["itl_p99_s", "ITL, p99"], ["prefix_hit_ratio", "prefix cache hits"],
];

export function showKeys(parent, figures) {
  sync(parent, KEYS, ([name]) => name,
    ([, words]) => el("div", {}, el("dt", {text: words}), el("dd", {}, el("b"), el("small"))),
    (node, [name]) => {
      const figure = figures[name];
      showFigure(node.querySelector("b"), figure);
      setText(node.querySelector("small"), keyNote(name, figure, figures));
    });
}

function keyNote(name, figure, figures) {
  if (figure.absent !== undefined) return figure.absent;
  const notes = [];
  if (name === "kv_used_ratio") {
    // Bytes are shown beside the share only where it is made of them.
    notes.push(figure.source === "by bytes" ? `${byteSize(figures.kv_used_bytes.value)} of ${byteSize(figures.kv_total_bytes.value)}` : figure.source);
  }
  if (figure.num < figure.of) notes.push(`${figure.num} of ${figure.of} tell it`);
  return notes.join("; ");
}

// The one sentence that an engineer reads first.
export function verdict(told) {
  const {states, fleet, rules} = told;
  const fired = rules.filter(rule => rule.fired);
  const rank = {error: 0, warning: 1, info: 2};
  fired.sort((a, b) => rank[a.severity] - rank[b.severity] || b.fired - a.fired);
  const said = [];
  if (states.unreachable) said.push(states.unreachable === fleet.num ? (fleet.num === 1 ? "It does not answer." : "None of them answers.") : `${plural(states.unreachable, "replica")} of ${count(fleet.num)} ${states.unreachable === 1 ? "does" : "do"} not answer.`);
  if (fired.length) {
    const most = fired.slice(0, 3).map(rule => `${rule.id} (${lower(rule.title)})${fleet.num > 1 ? ` on ${plural(rule.fired, "replica")}` : ""}`);
    const more = fired.length > 3 ? ` and ${plural(fired.length - 3, "more rule")}` : "";
    said.push(`Fired: ${most.join("; ")}${more}.`);
  } else if (fleet.answering) {
    const evaluated = rules.filter(rule => rule.clear).length;
    said.push(!rules.length ? "No rule has been asked yet." : evaluated ? `Nothing fired; ${evaluated} of ${rules.length} rules could be evaluated${fleet.num > 1 ? " somewhere" : ""}.` : `None of the ${rules.length} rules could be evaluated: nothing is known to be well.`);
  }
  if (fired.length && states.unknown) said.push(`On ${plural(states.unknown, "replica")} nothing could be evaluated.`);
  if (states.unreachable || states.error) return ["fault", "A fault", said];
  if (states.warning) return ["attention", "Needs attention", said];
  if (states.unknown || !rules.length) return ["incomplete", "Incomplete", said];
  if (fired.some(rule => rule.severity !== "info")) return ["attention", "Needs attention", said];
  return ["sound", "Nothing fired", said];
}

function lower(title) {
  return /^[A-Z][a-z]/.test(title) ? title[0].toLowerCase() + title.slice(1) : title;
}

export {seconds};
