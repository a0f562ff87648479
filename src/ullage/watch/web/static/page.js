// The page: asks for each round, shows it, keeps what was chosen. Holds state and wiring only.

import {Chart, CHARTS, History} from "/charts.js";
import {firedItem, incidentNode, redraw, replicaRow, ruleRow, setText, showKeys, showReplica, sync, updateIncident, updateReplicaRow, updateRuleRow, verdict} from "/lists.js";
import {HeatMap} from "/heat.js";
import {clock, count, duration, moment, plural} from "/words.js";

const SEVERITIES = ["info", "warning", "error"];
const STEP = 50, MOST_ROWS = 200;
const at = id => document.getElementById(id);

const state = {
  told: null, detail: null, detailOf: null, chosen: "", limit: STEP, history: new History(), historyOf: null,
  moment: null, span: 900, attention: null, attentionOf: null, clockOff: 0, failed: "", asking: null, again: false, streams: false,
};

const now = () => Date.now() / 1000 + state.clockOff;

// ---- asking

async function ask(path, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== ""));
  const response = await fetch(`${path}?${query}`, {headers: {accept: "application/json"}, signal: AbortSignal.timeout(20000)});
  if (response.status === 401) location.assign("/login");
  if (response.status === 404) return null;
  if (!response.ok) throw new Error(`the watcher answers ${response.status}`);
  const date = response.headers.get("x-now");
  if (date) state.clockOff = Number(date) - Date.now() / 1000;
  return response.json();
}

// Only one at a time; what comes meanwhile is asked afterwards. Ends when all is shown.
function refresh() {
  state.again = true;
  state.asking ??= askAll().finally(() => { state.asking = null; });
  return state.asking;
}

async function askAll() {
  try {
    do {
      state.again = false;
      const told = await ask("/api/sight", {search: at("search").value.trim(), sort: at("sort").value, limit: state.limit});
      state.failed = "";
      if (told.round) {
        state.told = told;
        if (told.fleet.num === 1 && told.replicas.rows.length === 1) state.chosen = told.replicas.rows[0].id;
        await readChosen();
        show();
        readAttention();
      }
    } while (state.again);
  } catch (error) {
    state.failed = error instanceof TypeError || error.name === "TimeoutError" ? "the watcher does not answer" : error.message;
  } finally {
    showPulse();
  }
}

async function readChosen() {
  const chosen = state.chosen;
  if (state.historyOf !== chosen) {
    state.history = new History();
    state.historyOf = chosen;
    state.moment = null;
  }
  const [detail, history] = await Promise.all([
    chosen ? ask("/api/replica", {id: chosen}) : null,
    ask("/api/history", {id: chosen, since: state.history.last}),
  ]);
  if (state.chosen !== chosen) { state.again = true; return; }
  state.detail = detail;
  state.detailOf = chosen;
  if (history) state.history.add(history);
}

// What a replica's heads do is asked of the replica itself, which may be busy: nobody waits for it.
let attending = false;

async function readAttention() {
  const chosen = state.chosen;
  if (state.attentionOf !== chosen) {
    state.attention = null;
    state.attentionOf = chosen;
    showAttention();
  }
  if (!chosen || attending) return;
  attending = true;
  try {
    const told = await ask("/api/attention", {id: chosen});
    if (state.chosen === chosen) {
      state.attention = told?.told ? told : null;
      showAttention();
      if (state.detail && state.detailOf === chosen) showReplica(withFindings(state.detail), state.told.time_s);
    }
  } catch {
    // The pulse says that the watcher does not answer; the map stays what it was.
  } finally {
    attending = false;
  }
}

const withFindings = detail => ({...detail, findings: [...detail.findings, ...state.attentionOf === state.detailOf ? state.attention?.findings ?? [] : []]});

// ---- showing

function show() {
  const {told} = state;
  const {fleet} = told;
  const replicas = plural(fleet.num, "replica");
  const title = fleet.models.length === 1 ? (fleet.num === 1 ? fleet.models[0] : `${replicas} of ${fleet.models[0]}`)
    : fleet.models.length ? `${replicas}, ${plural(fleet.models.length, "model")}` : replicas;
  setText(at("title"), title);
  document.title = `${told.incidents.num_now ? `(${told.incidents.num_now}) ` : ""}${title} · ullage watch`;
  const engines = fleet.engines.slice(0, 4).join(", ") + (fleet.engines.length > 4 ? ` and ${fleet.engines.length - 4} more` : "");
  setText(at("meta"), [engines, `every ${duration(told.interval_s)}`, `round ${count(told.round)} at ${clock(told.time_s)}`].filter(Boolean).join(" · "));
  const [kind, heading, sentences] = verdict(told);
  at("verdict").className = `verdict ${kind}`;
  at("verdict").hidden = false;
  setText(at("verdict").children[0], heading);
  setText(at("verdict").children[1], sentences.join(" "));
  showKeys(at("keys"), fleet.figures);
  for (const id of ["incidents", "replicas", "time", "rules"]) at(id).hidden = false;
  showIncidents();
  showRows();
  at("rules").hidden = !told.rules.length;
  sync(at("rule-rows"), told.rules, rule => rule.id, ruleRow, updateRuleRow);
  showChosen();
}

const incidentKey = incident => `${incident.replica}|${incident.id}|${incident.since_s}`;

function showIncidents() {
  const {incidents, time_s: timeS, fleet} = state.told;
  const only = at("incidents-of").checked && state.chosen;
  const here = list => only ? list.filter(i => i.replica === state.chosen) : list;
  at("incidents-of-label").hidden = !state.chosen || fleet.num === 1;
  const current = here(incidents.now), ended = here(incidents.ended);
  setText(at("incidents-title"), current.length ? (current.length === 1 ? "1 incident" : `${count(only ? current.length : incidents.num_now)} incidents`) : "No incident");
  sync(at("incidents-now"), current, incidentKey, incidentNode(choose), (node, i) => updateIncident(node, i, timeS));
  at("incidents-past").hidden = !ended.length;
  setText(at("incidents-past").firstElementChild, `${count(only ? ended.length : incidents.num_ended)} that ended in the last day`);
  sync(at("incidents-ended"), ended, incidentKey, incidentNode(choose), (node, i) => updateIncident(node, i, timeS));
}

function showRows() {
  const {replicas, fleet} = state.told;
  sync(at("rows"), replicas.rows, row => row.id, replicaRow(choose), (node, row) => updateReplicaRow(node, row, fleet.num > 1 ? state.chosen : ""));
  const shown = replicas.rows.length;
  const found = replicas.matched === fleet.num ? plural(fleet.num, "replica") : `${count(replicas.matched)} of ${plural(fleet.num, "replica")} found`;
  setText(at("shown"), shown < replicas.matched ? `${found}; the first ${shown} are shown.` : replicas.matched < fleet.num || fleet.num > 1 ? `${found}.` : "");
  at("more").hidden = shown >= replicas.matched || state.limit >= MOST_ROWS;
  at("find").hidden = fleet.num < 2;
}

function showChosen() {
  const {told, detail} = state;
  const one = told.fleet.num === 1;
  if (state.detailOf !== state.chosen) return;
  at("replica").hidden = !state.chosen;
  at("everything").hidden = !state.chosen || one;
  setText(at("time-title"), !state.chosen || one ? "Over time" : `Over time: ${detail ? detail.name : "a replica that is gone"}`);
  if (state.chosen && detail) showReplica(withFindings(detail), told.time_s);
  else if (state.chosen) {
    setText(at("replica-title"), "A replica that is gone");
    at("replica-error").hidden = false;
    setText(at("replica-error"), "The latest round does not have the replica that was chosen.");
    for (const id of ["figures", "absent", "identity", "changes", "findings", "settings"]) redraw(at(id), [], () => []);
  }
  showCharts();
}

const charts = CHARTS.map(spec => new Chart(spec, pointAt));
at("charts").append(...charts.map(chart => chart.node));

const heat = new HeatMap();
at("heat").append(heat.node);

function showAttention() {
  const told = state.attention;
  at("attention").hidden = !told;
  if (!told) return;
  at("attention-why").hidden = !told.why;
  setText(at("attention-why"), told.why ? `Not known: ${told.why}.` : "");
  heat.node.hidden = at("heat-of-label").hidden = Boolean(told.why);
  const fired = (told.findings ?? []).filter(finding => finding.state === "fired");
  redraw(at("attention-fired"), fired, list => list.map(firedItem));
  at("attention-fired").hidden = !fired.length;
  if (!told.why) heat.draw(told, at("heat-of").value);
}

function marks() {
  const {incidents} = state.told;
  const ours = [...incidents.now, ...incidents.ended].filter(i => !state.chosen || i.replica === state.chosen);
  const changes = state.chosen ? state.detail?.changes ?? [] : ours.flatMap(i => i.changed);
  return {
    // The worst last, so that nothing lies over it.
    incidents: ours.map(i => ({from: i.since_s, until: i.until_s, severity: i.severity}))
      .sort((a, b) => SEVERITIES.indexOf(a.severity) - SEVERITIES.indexOf(b.severity)),
    changes: [...new Set(changes.map(c => c.time_s))],
  };
}

function showCharts() {
  const {history, told} = state;
  if (!told) return;
  const untilS = told.time_s;
  // While the past is shorter than the span, the chart is as long as the past.
  const fromS = Math.max(untilS - state.span, Math.min(history.times[0] ?? untilS, untilS - 60));
  const first = Math.min(history.from(fromS), Math.max(0, history.times.length - 1));
  let row = null;
  if (state.moment !== null && history.times.length) {
    row = Math.min(history.times.length - 1, Math.max(first, history.from(state.moment)));
    if (row > first && state.moment - history.times[row - 1] < history.times[row] - state.moment) row -= 1;
  }
  const what = marks();
  for (const chart of charts) chart.draw(history, fromS, untilS, row, what);
  const slider = at("moment");
  slider.min = String(first);
  slider.max = String(Math.max(first, history.times.length - 1));
  slider.value = row === null ? slider.max : String(row);
  const text = row === null ? "now" : moment(history.times[row], told.time_s);
  setText(at("moment-text"), text);
  slider.setAttribute("aria-valuetext", text);
}

let frame = 0;

function drawSoon() {
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(() => { showCharts(); showAttention(); });
}

function pointAt(timeS) {
  state.moment = timeS;
  drawSoon();
}

function showPulse() {
  const stale = at("stale"), pulse = at("pulse");
  const age = state.told ? now() - state.told.time_s : 0;
  const late = state.told && age > Math.max(15, 3 * state.told.interval_s);
  let said = "";
  if (state.failed) said = state.told ? `What is shown is ${duration(age)} old: ${state.failed}.` : `Nothing can be shown: ${state.failed}.`;
  else if (late) said = `What is shown is ${duration(age)} old: the watcher answers, but no new round has come.`;
  pulse.dataset.state = said ? "lost" : state.told ? "live" : "waiting";
  pulse.title = said ? "not live" : state.told ? "live" : "waiting";
  document.body.classList.toggle("old", Boolean(said && state.told));
  stale.hidden = !said;
  setText(stale, said);
}

// ---- choosing

function choose(id, {quietly = false} = {}) {
  state.chosen = id;
  if (!quietly) {
    location.hash = id ? `replica=${id}` : "";
    refresh().then(() => {
      at("time").scrollIntoView({block: "start"});
      at("time").focus({preventScroll: true});
    });
  }
}

function chosenByHash() {
  const id = new URLSearchParams(location.hash.slice(1)).get("replica") ?? "";
  return /^[0-9a-f]{16}$/.test(id) ? id : "";
}

let typing = 0;
at("search").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => { state.limit = STEP; refresh(); }, 150);
});
at("find").addEventListener("submit", event => { event.preventDefault(); refresh(); });
at("sort").addEventListener("change", () => { state.limit = STEP; refresh(); });
at("more").addEventListener("click", () => { state.limit = Math.min(MOST_ROWS, state.limit + STEP); refresh(); });
at("everything").addEventListener("click", () => choose(""));
at("heat-of").addEventListener("change", showAttention);
at("incidents-of").addEventListener("change", showIncidents);
at("span").addEventListener("change", () => { state.span = Number(at("span").value); state.moment = null; showCharts(); });
at("moment").addEventListener("input", () => {
  const i = Number(at("moment").value);
  state.moment = i >= state.history.times.length - 1 ? null : state.history.times[i];
  drawSoon();
});
addEventListener("resize", drawSoon);
addEventListener("hashchange", () => {
  const id = chosenByHash();
  if (id !== state.chosen && !(state.told?.fleet.num === 1)) { choose(id, {quietly: true}); refresh(); }
});

// ---- why a figure is not known, or where it is from

const tip = at("tip");

let told = null;

function tell(event) {
  const focused = event.type === "focusin";
  if (told?.focused && !focused) return;
  const node = event.target.closest?.("[data-why]");
  document.querySelector("[aria-describedby=tip]")?.removeAttribute("aria-describedby");
  told = node ? {node, focused} : null;
  if (node && focused) node.setAttribute("aria-describedby", "tip");
  placeTip();
}

function placeTip() {
  tip.hidden = !told?.node.isConnected || !told.node.dataset.why;
  if (tip.hidden) return;
  setText(tip, told.node.dataset.why);
  const box = told.node.getBoundingClientRect();
  const width = tip.offsetWidth, height = tip.offsetHeight;
  const above = box.bottom + height + 8 > innerHeight;
  tip.style.left = `${Math.max(8, Math.min(box.left, document.documentElement.clientWidth - width - 8))}px`;
  tip.style.top = `${above ? Math.max(8, box.top - height - 6) : box.bottom + 6}px`;
}

function untell() {
  told = null;
  placeTip();
}

document.addEventListener("pointerover", tell);
document.addEventListener("focusin", tell);
document.addEventListener("focusout", untell);
document.addEventListener("keydown", event => { if (event.key === "Escape") untell(); });
addEventListener("scroll", placeTip, {passive: true});

// ---- rounds: told by the server where it can, else asked for

function listen() {
  const events = new EventSource("/api/events");
  events.addEventListener("message", () => { state.streams = true; refresh(); });
  events.addEventListener("error", () => {
    state.streams = false;
    refresh();
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 15000);
  });
}

function poll() {
  const every = state.told ? Math.max(1, state.told.interval_s) : 2;
  setTimeout(() => { if (!state.streams || state.failed) refresh(); else showPulse(); poll(); }, every * 1000);
}

state.chosen = chosenByHash();
refresh();
listen();
poll();
setInterval(showPulse, 1000);
