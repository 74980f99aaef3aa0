// The page of `openrlhf view`. Whatever comes from a run is written as text, never as HTML.
"use strict";

const COLOURS = ["#3b6fd4", "#d9822b", "#2a9d6f", "#b5489d", "#8a6d3b", "#5f6b7a", "#c0392b", "#17a2b8"];
const POLL = 2500;
const $ = (id) => document.getElementById(id);

/** Makes an element: properties, attributes of `attributes`, listeners as onNAME, children as nodes or text. */
function h(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  const { attributes = {}, ...rest } = properties;
  Object.assign(node, rest);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

async function get(path, query = {}) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of [value].flat()) if (one !== null && one !== undefined && one !== "") parameters.append(name, one);
  }
  const response = await fetch(`api/${path}?${parameters}`);
  const content = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(content.error || JSON.stringify(content.detail) || response.statusText);
  return content;
}

const state = {
  tab: "curves", runs: [], hidden: new Set(), sections: [], shown: [], smoothing: 0.07, log: false,
  search: {}, rows: [], total: 0, selected: null, compared: [], colour: "probability",
};
const number = (value) => (value === null || value === undefined ? NaN : Number(value));
const count = (value) => Number(value).toLocaleString("en");
function short(value) {
  const x = number(value);
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(x)) return String(value);
  if (Number.isInteger(x) && Math.abs(x) < 1e6) return String(x);
  return x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e6) ? x.toExponential(2) : x.toPrecision(4).replace(/\.?0+$/, "");
}
const colourOf = (run) => COLOURS[run % COLOURS.length];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function swatch(run) {
  const node = h("span", { className: "swatch", title: state.runs[run] ? state.runs[run].name : "" });
  node.style.backgroundColor = colourOf(run);
  return node;
}

function fail(error) {
  $("status").textContent = error.message;
  $("status").className = "problem";
}
const guarded = (work) => (...values) => Promise.resolve(work(...values)).catch(fail);

// Tabs, runs and what is new ---------------------------------------------------------------------------------

const TABS = { curves: "Curves", rollouts: "Rollouts", errors: "Errors", comparison: "Runs" };
const SHOW = { curves: showCurves, rollouts: showRollouts, errors: showErrors, comparison: showComparison };

function drawTabs() {
  $("tabs").replaceChildren(...Object.entries(TABS).map(([name, title]) =>
    h("button", { textContent: title, onclick: () => open(name), attributes: { role: "tab", "aria-selected": state.tab === name } })));
}

function open(tab) {
  state.tab = tab;
  for (const name of Object.keys(TABS)) $(name).hidden = name !== tab;
  drawTabs();
  remember();
  return guarded(SHOW[tab])();
}

function drawRuns() {
  $("runs").replaceChildren(...state.runs.map((run, i) => {
    const facts = [];
    if (run.last_step !== null) facts.push(`step ${count(run.last_step)}`);
    if (run.rollouts) facts.push(`${count(run.rollouts)} rollouts`);
    return h("button", {
      className: "run", title: [run.path, ...run.notes].join("\n"),
      onclick: () => {
        state.hidden.has(i) ? state.hidden.delete(i) : state.hidden.add(i);
        drawRuns();
        if (state.tab === "curves") drawCharts();
      },
      attributes: { "aria-pressed": !state.hidden.has(i) },
    }, swatch(i), h("span", { textContent: run.name }), h("span", { className: "quiet", textContent: facts.join(" · ") }),
    run.notes.length ? h("span", { className: "bad", textContent: "!" }) : null);
  }));
}

async function poll() {
  const news = await get("state");
  const changed = (name) => news.runs.some((run, i) => !state.runs[i] || run[name] !== state.runs[i][name]);
  const metrics = changed("rows"), rollouts = changed("rollouts");
  const first = state.runs.length === 0;
  state.runs = news.runs;
  if (metrics || rollouts) drawRuns();
  const waiting = news.runs.reduce((sum, run) => sum + run.files_waiting, 0);
  const files = news.runs.reduce((sum, run) => sum + run.files, waiting);
  const notes = news.runs.flatMap((run) => run.notes);
  $("status").className = news.error || notes.length ? "problem" : "";
  $("status").textContent = news.error || (waiting ? `reading rollouts: ${count(files - waiting)} of ${count(files)} files` : notes[0] || "");
  if (first) return;
  if (metrics && state.tab === "curves") await showCurves();
  if (rollouts && state.tab === "rollouts") { await loadChoices(); await loadRollouts(); }
  if (rollouts && state.tab === "errors") await showErrors();
}

/** Keeps what is shown in the address, so that it can be reloaded and sent. */
function remember() {
  const parameters = new URLSearchParams({ tab: state.tab });
  for (const [name, value] of Object.entries(state.search)) if (value !== "" && value !== null) parameters.set(`f.${name}`, value);
  for (const name of state.shown) parameters.append("m", name);
  history.replaceState(null, "", `#${parameters}`);
}

function recall() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  if (TABS[parameters.get("tab")]) state.tab = parameters.get("tab");
  for (const [name, value] of parameters) if (name.startsWith("f.")) state.search[name.slice(2)] = value;
  state.shown = parameters.getAll("m");
}

// Curves -----------------------------------------------------------------------------------------------------

async function showCurves() {
  const { sections, headlines } = await get("metrics");
  if (!state.shown.length) state.shown = headlines.length ? headlines : sections.flatMap(([, names]) => names).slice(0, 6);
  if (JSON.stringify(sections) !== JSON.stringify(state.sections)) {
    state.sections = sections;
    drawMetricList();
  }
  await loadCurves();
}

function drawMetricList() {
  const wanted = $("metric-search").value.toLowerCase();
  const box = (name) => {
    const end = name.lastIndexOf("/") + 1;
    return h("label", { title: name }, h("input", {
      type: "checkbox", checked: state.shown.includes(name), onchange: guarded((event) => choose(name, event.target.checked)),
    }), h("span", {}, h("span", { className: "quiet", textContent: name.slice(0, end) }), name.slice(end)));
  };
  const found = state.sections.map(([heading, names]) => [heading, names.filter((name) => name.toLowerCase().includes(wanted))]);
  $("metric-list").replaceChildren(...found.filter(([, names]) => names.length).map(([heading, names]) =>
    h("details", { open: wanted !== "" || names.some((name) => state.shown.includes(name)) },
      h("summary", {}, heading, " ", h("span", { className: "quiet", textContent: names.length })), names.map(box))));
}

function choose(name, on) {
  state.shown = on ? [...state.shown, name] : state.shown.filter((other) => other !== name);
  remember();
  return loadCurves();
}

let latestCurves = 0;
async function loadCurves() {
  const asked = ++latestCurves;
  const curves = state.shown.length ? await get("curves", { name: state.shown, smoothing: state.smoothing }) : {};
  if (asked !== latestCurves) return;
  state.curves = curves;
  drawCharts();
}

/** Plotly reads some HTML in texts; these characters end it. */
const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function drawCharts() {
  const box = $("charts");
  const kept = new Map([...box.children].map((card) => [card.dataset.name, card]));
  const cards = state.shown.map((name) => kept.get(name) || h("div", { className: "chart" },
    h("h2", {}, h("span", { textContent: name }), h("span", { className: "bad" }), h("button", {
      textContent: "×", title: "remove the chart", onclick: guarded(async () => { await choose(name, false); drawMetricList(); }),
    })), h("div", { className: "plot" })));
  cards.forEach((card, i) => { card.dataset.name = state.shown[i]; });
  for (const [name, card] of kept) if (!state.shown.includes(name)) Plotly.purge(card.lastChild);
  if (cards.length !== box.children.length || cards.some((card, i) => box.children[i] !== card)) box.replaceChildren(...cards);
  if (!cards.length) box.replaceChildren(h("p", { className: "quiet", textContent: "Choose metrics on the left." }));
  state.shown.forEach((name, i) => drawChart(cards[i].lastChild, (state.curves || {})[name] || []));
}

function drawChart(plot, curves) {
  const traces = [];
  const steps = curves.flatMap((curve) => curve.steps);
  const few = steps.length > 0 && steps.reduce((a, b) => Math.max(a, b)) - steps.reduce((a, b) => Math.min(a, b)) < 8;
  const odd = curves.reduce((sum, curve) => sum + curve.num_bad, 0);
  plot.previousSibling.children[1].textContent = odd ? `${count(odd)} not finite` : "";
  for (const { run, steps, values, means } of curves) {
    if (state.hidden.has(run)) continue;
    const numbers = values.map(Number);
    const common = { x: steps, mode: steps.length > 1 ? "lines" : "markers", customdata: steps.map(() => run), line: { color: colourOf(run), width: 1.8 } };
    if (means.length) traces.push({ ...common, y: numbers, opacity: 0.25, hoverinfo: "skip", line: { color: colourOf(run), width: 1 } });
    traces.push({
      ...common, y: means.length ? means.map(Number) : numbers, text: numbers.map((x) => short(x)),
      name: plain(state.runs[run].name.slice(0, 60)), marker: { color: colourOf(run) },
      hovertemplate: `%{y:.4~g}${means.length ? " (%{text})" : ""}`,
    });
  }
  const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), automargin: true, tickfont: { size: 11 } };
  Plotly.react(plot, traces, {
    margin: { l: 44, r: 12, t: 30, b: 28 }, modebar: { bgcolor: "transparent" }, showlegend: false, hovermode: "x unified", dragmode: "zoom", uirevision: "kept",
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { color: css("--text"), size: 12 },
    hoverlabel: { namelength: 40, bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--text"), size: 12 } },
    xaxis: { ...axis, title: { text: "step", standoff: 4, font: { size: 11 } }, hoverformat: ",d", dtick: few ? 1 : undefined }, yaxis: { ...axis, type: state.log ? "log" : "linear" },
  }, { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] });
  if (!plot.dataset.clicks) {
    plot.dataset.clicks = "1";
    plot.on("plotly_click", ({ points }) => {
      const { x, customdata } = points[0];
      state.search = { step_min: x, step_max: x, run: state.runs.length > 1 ? customdata : "" };
      open("rollouts");
    });
  }
}

// Rollouts ---------------------------------------------------------------------------------------------------

const FIELDS = [
  ["run", "run", "select"], ["kind", "of", "select"], ["step", "step", "range"], ["reward", "reward", "range"],
  ["length", "tokens", "range"], ["text", "contains", "text"], ["prompt_id", "prompt", "number"],
  ["state", "samples", "select"], ["source", "source", "select"], ["finish_reason", "ended by", "select"],
  ["error", "error contains", "text"], ["log", "log", "select"], ["log_range", "", "range"], ["turns", "turns", "range"],
  ["version", "weights", "range"], ["ignore_case", "ignore case", "check"],
];
const STATES = [["", "all"], ["failed=false", "scored"], ["failed=true", "failed"], ["truncated=true", "cut off"], ["truncated=false", "not cut off"]];
const SORTS = ["step", "reward", "score", "length", "turns", "version", "prompt_id"];
let choicesOf = {};

async function showRollouts() {
  await loadChoices();
  await loadRollouts();
}

async function loadChoices() {
  choicesOf = await get("choices");
  drawFilter();
}

function drawFilter() {
  if ($("filter").contains(document.activeElement)) return;
  const search = state.search;
  const change = guarded((name, value) => {
    search[name] = value;
    search.offset = 0;
    return loadRollouts();
  });
  const input = (name, type, title = "") => h("input", {
    type, value: search[name] ?? "", step: "any", title, onchange: (event) => change(name, event.target.value),
    attributes: { "aria-label": title || name, name },
  });
  const select = (name, options, value, onchange) => h("select", { onchange: (event) => onchange(event.target.value), attributes: { "aria-label": name, name } },
    options.map(([key, text]) => h("option", { value: key, textContent: text, selected: String(value ?? "") === String(key) })));
  const controls = FIELDS.map(([name, title, kind]) => {
    if (kind === "range") {
      const of = name === "log_range" ? "log" : name;
      if (name === "log_range" && !search.log) return null;
      return h("label", {}, title, input(`${of}_min`, "number", `smallest ${of}`), "–", input(`${of}_max`, "number", `largest ${of}`));
    }
    if (kind === "check") {
      return h("label", {}, h("input", { type: "checkbox", checked: search[name] === "true", onchange: (event) => change(name, event.target.checked ? "true" : "") }), title);
    }
    if (name === "run") {
      if (state.runs.length < 2) return null;
      return h("label", {}, title, select(name, [["", "all"], ...state.runs.map((run, i) => [i, run.name])], search.run, (value) => change(name, value)));
    }
    if (name === "state") {
      const chosen = STATES.find(([key]) => key && search[key.split("=")[0]] === key.split("=")[1]);
      return h("label", {}, title, select(name, STATES, chosen ? chosen[0] : "", (value) => {
        delete search.failed;
        delete search.truncated;
        const [key, flag] = value.split("=");
        change(key || "failed", flag || "");
      }));
    }
    if (kind === "select") {
      const options = choicesOf[name] || [];
      if (options.length < (name === "log" ? 1 : 2) && !search[name]) return null;
      return h("label", {}, title, select(name, [["", "all"], ...options.map((value) => [value, value])], search[name], (value) => {
        change(name, value).then(drawFilter);
      }));
    }
    return h("label", {}, title, input(name, kind));
  });
  const sort = select("sort", [...SORTS.map((name) => [name, name.replace("_", " ")]), ...(search.log ? [["log", `log ${search.log}`]] : [])],
    search.by_log === "true" ? "log" : search.sort || "step", (value) => {
      search.by_log = value === "log" ? "true" : "";
      change("sort", value === "log" ? "step" : value);
    });
  const order = select("order", [["true", "largest first"], ["false", "smallest first"]], search.descending ?? "true", (value) => change("descending", value));
  $("filter").replaceChildren(...controls.filter(Boolean), h("label", {}, "sort", sort, order),
    h("button", { type: "button", textContent: "clear", onclick: guarded(() => { state.search = {}; drawFilter(); return loadRollouts(); }) }));
}
$("filter").addEventListener("submit", (event) => event.preventDefault());

let latest = 0;
async function loadRollouts() {
  remember();
  const asked = ++latest;
  const began = performance.now();
  const { total, rows } = await get("rollouts", state.search);
  if (asked !== latest) return;
  Object.assign(state, { total, rows });
  drawTable((performance.now() - began) / 1000);
}

const placeOf = ({ run, file, row }) => ({ run, file, row });
const same = (a, b) => a && b && a.run === b.run && a.file === b.file && a.row === b.row;
const COLUMNS = [["", ""], ["step", "step"], ["prompt", "prompt_id"], ["reward", "reward"], ["tokens", "length"], ["", ""], ["prompt and answer", ""]];

function drawTable(seconds) {
  const { search, rows, total } = state;
  const offset = Number(search.offset || 0), limit = 50;
  const turn = (by) => guarded(() => { search.offset = Math.max(0, offset + by); $("list").scrollTop = 0; return loadRollouts(); });
  $("pager").replaceChildren(
    h("span", { textContent: total ? `${count(offset + 1)} to ${count(offset + rows.length)} of ${count(total)}` : "" }),
    h("button", { textContent: "‹ previous", disabled: offset === 0, onclick: turn(-limit) }),
    h("button", { textContent: "next ›", disabled: offset + rows.length >= total, onclick: turn(limit) }),
    h("span", { className: "quiet", textContent: `${seconds.toFixed(2)} s` }),
    h("button", { className: "right", textContent: "compare the two answers", disabled: state.compared.length !== 2, onclick: guarded(showDiff) }));
  $("table").tHead.replaceChildren(h("tr", {}, COLUMNS.map(([title, key], i) => h("th", {
    className: `${i > 0 && i < 5 ? "number" : ""} ${key ? "sortable" : ""}`, textContent: title + (key && key === (search.sort || "step") && search.by_log !== "true" ? (search.descending === "false" ? " ↑" : " ↓") : ""),
    onclick: key ? guarded(() => {
      const again = key === (search.sort || "step");
      Object.assign(search, { sort: key, by_log: "", descending: again && search.descending !== "false" ? "false" : "true", offset: 0 });
      drawFilter();
      return loadRollouts();
    }) : null,
  }))));
  $("table").tBodies[0].replaceChildren(...rows.map(tableRow));
  $("empty").hidden = rows.length > 0;
  $("empty").textContent = state.runs.some((run) => run.files_waiting) ? "The rollouts are still being read." :
    state.runs.some((run) => run.rollouts) ? "No rollout matches." : "These runs have no rollouts: supervised runs have none, and --logger.rollouts off keeps none.";
}

function tableRow(row) {
  const place = placeOf(row);
  const check = h("input", {
    type: "checkbox", title: "compare", checked: state.compared.some((other) => same(other, place)),
    onclick: (event) => event.stopPropagation(),
    onchange: (event) => {
      state.compared = state.compared.filter((other) => !same(other, place));
      if (event.target.checked) state.compared = [...state.compared, place].slice(-2);
      drawTable(0);
    },
  });
  const marks = [];
  if (row.outcome !== "ok") marks.push(h("span", { className: "chip bad", textContent: row.outcome, title: row.error }));
  if (row.truncated) marks.push(h("span", { className: "chip", textContent: "cut off" }));
  if (row.num_images) marks.push(h("span", { className: "chip", textContent: `${row.num_images} images` }));
  if (row.turns > 1) marks.push(h("span", { className: "chip", textContent: `${row.turns} turns` }));
  const where = row.kind === "step" ? row.step : `${row.kind} ${row.step}`;
  const show = guarded(() => showDetail(place));
  return h("tr", { onclick: show, onkeydown: (event) => { if (event.key === "Enter") show(); }, tabIndex: 0, attributes: { "aria-selected": Boolean(same(state.selected, place)) } },
    h("td", {}, h("span", { className: "line" }, check, state.runs.length > 1 ? swatch(row.run) : null)),
    h("td", { className: "number", textContent: where }),
    h("td", { className: "number", textContent: `${row.prompt_id}·${row.sample_index}` }),
    h("td", { className: "number", textContent: short(row.reward) }),
    h("td", { className: "number", textContent: row.length }),
    h("td", {}, marks),
    h("td", { className: "excerpt" }, h("div", { className: "quiet excerpt-line", textContent: (row.prompt || "").replace(/\s+/g, " ") }),
      h("div", { textContent: (row.response ?? row.error ?? "").replace(/\s+/g, " ") })));
}

function openDetail(...content) {
  $("split").classList.add("open");
  $("detail").replaceChildren(...content);
  $("detail").scrollTop = 0;
}

function closeDetail() {
  state.selected = null;
  $("split").classList.remove("open");
  drawTable(0);
}

const pairs = (facts) => h("dl", { className: "facts" }, facts.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) =>
  h("div", {}, h("dt", { textContent: name }), h("dd", { textContent: value }))));

async function showDetail(place) {
  state.selected = place;
  drawTable(0);
  const listed = state.rows.find((row) => same(row, place)) || {};
  const content = await get("rollout", place);
  if (!same(state.selected, place)) return;
  const where = `${state.runs.length > 1 ? `${state.runs[place.run].name} · ` : ""}${listed.kind ?? ""} ${listed.step ?? ""} · prompt ${content.prompt_id} sample ${content.sample_index}`;
  const visits = (content.optimizer_steps || []).map((step, i) => `${step} on rank ${content.ranks[i]}`).join(", ");
  const label = content.label ?? "";
  openDetail(
    h("div", { className: "bar" }, h("h2", { textContent: where }),
      h("button", { className: "right", textContent: "this prompt at every step", onclick: guarded(() => {
        state.search = { prompt_id: content.prompt_id, run: state.runs.length > 1 ? place.run : "", sort: "step", descending: "false" };
        drawFilter();
        return loadRollouts();
      }) }), h("button", { textContent: "×", title: "close", onclick: closeDetail })),
    pairs([["reward", short(content.reward)], ["score", content.score === null ? "" : short(content.score)], ["outcome", content.outcome],
      ["ended by", content.finish_reason + (content.truncated ? ", cut off" : "")], ["prompt tokens", content.prompt_tokens], ["tokens", content.token_ids.length],
      ["weights", (content.weight_versions || []).map((run) => run.version + (content.weight_versions.length > 1 ? ` (${run.count})` : "")).join(", ")],
      ["trained in optimizer step", visits], ["source", content.source], ["epoch", content.epoch], ["part", content.part || ""], ["seed", content.seed],
      ["turn rewards", (content.turn_rewards || []).map(short).join(", ")]]),
    ...(content.error ? [h("h3", { textContent: "error" }), h("pre", { className: "limited bad", textContent: content.error })] : []),
    ...(content.extra_logs && content.extra_logs.length ? [h("h3", { textContent: "rewards, judges and logs" }), pairs(content.extra_logs.map((log) => [log.name, short(log.value)]))] : []),
    ...(content.extra_texts || []).flatMap((text) => [h("h3", { textContent: `said by the reward source: ${text.name}` }), h("pre", { className: "limited", textContent: text.value })]),
    ...(label ? [h("h3", { textContent: "label" }), h("pre", { className: "limited", textContent: label })] : []),
    h("h3", { textContent: "prompt" }), h("pre", { className: "limited", textContent: content.prompt }),
    ...pictures(place, content.images || []),
    ...answerOf(place, content));
}

function pictures(place, names) {
  return names.map((name, i) => {
    const caption = h("figcaption", { textContent: name });
    const image = h("img", { alt: name, src: `api/image?${new URLSearchParams({ ...place, number: i })}` });
    image.addEventListener("error", () => { image.remove(); caption.textContent = `${name} (the picture is not on this machine)`; });
    return h("figure", {}, image, caption);
  });
}

// Tokens -----------------------------------------------------------------------------------------------------

const TRACKS = {
  probability: ["probability of the sampler", "low"], surprisal: ["surprisal −log p (its mean estimates the entropy)", "high"],
  gap: ["gap: log p of the trainer − log p of the sampler", "signed"], reference: ["log p of the policy − log p of the reference", "signed"],
  advantages: ["advantage", "signed"], values: ["value of the critic", "signed"], returns: ["return", "signed"],
  version: ["version of the weights", "group"], turn: ["turn", "group"],
};
const POSITIVE = [35, 134, 84], NEGATIVE = [205, 60, 50], STRONG = [217, 130, 43];
const tint = ([r, g, b], strength) => `rgba(${r},${g},${b},${(0.75 * Math.min(1, Math.max(0, strength))).toFixed(3)})`;

/** Returns the colour of a value, and a legend as [colours, text of the left end, text of the right end]. */
function scaleOf(kind, values) {
  const finite = values.map(number).filter(Number.isFinite);
  if (kind === "low") return [(p) => tint(STRONG, 1 - p), [[0, 0.25, 0.5, 0.75, 1].map((p) => tint(STRONG, 1 - p)), "0", "1"]];
  const largest = finite.reduce((most, x) => Math.max(most, Math.abs(x)), 0) || 1;
  if (kind === "high") return [(x) => tint(STRONG, x / largest), [[0, 0.25, 0.5, 0.75, 1].map((x) => tint(STRONG, x)), "0", short(largest)]];
  if (kind === "signed") {
    const at = (x) => tint(x < 0 ? NEGATIVE : POSITIVE, Math.abs(x) / largest);
    return [at, [[-1, -0.5, 0, 0.5, 1].map((x) => at(x * largest)), short(-largest), short(largest)]];
  }
  const groups = [...new Set(finite)].sort((a, b) => a - b);
  const at = (x) => `${COLOURS[groups.indexOf(x) % COLOURS.length]}55`;
  return [at, [groups.slice(0, 12).map(at), short(groups[0]), short(groups[groups.length - 1])]];
}

function answerOf(place, content) {
  const names = Object.keys(TRACKS).filter((name) => content.tracks[name]);
  if (!names.includes(state.colour)) state.colour = names[0];
  const box = h("div", { className: "tokens", textContent: content.response ?? "" });
  const legend = h("div", { id: "legend", attributes: { "aria-label": "legend" } });
  const hover = h("div", { id: "hover" });
  let texts = null;
  const paint = () => {
    const [title, kind] = TRACKS[state.colour];
    const values = content.tracks[state.colour];
    const [colour, [colours, left, right]] = scaleOf(kind, values);
    legend.replaceChildren(h("span", { textContent: title }), h("span", { textContent: left }), h("span", { className: "scale" }, colours.map((one) => {
      const cell = h("i");
      cell.style.backgroundColor = one;
      return cell;
    })), h("span", { textContent: right }), h("em", { textContent: "not chosen by the policy" }));
    box.childNodes.forEach((node, i) => {
      if (node.nodeType !== Node.ELEMENT_NODE || values[i] === null) return;
      const value = number(values[i]);
      node.style.backgroundColor = Number.isFinite(value) ? colour(value) : "transparent";
    });
  };
  const write = (found) => {
    texts = found;
    const chosen = content.tracks.turn || [];
    box.replaceChildren(...content.token_ids.map((id, i) => h("span", {
      textContent: texts ? texts[i] : id, className: `${chosen[i] === null || chosen[i] === undefined ? "given" : ""} ${texts ? "" : "id"}`,
    })));
    paint();
  };
  box.addEventListener("mouseover", (event) => {
    const i = [...box.childNodes].indexOf(event.target);
    if (i < 0 || event.target === box) return;
    const facts = names.filter((name) => content.tracks[name][i] !== null).map((name) => ` · ${name} ${short(content.tracks[name][i])}`);
    hover.replaceChildren(h("b", { textContent: JSON.stringify(texts ? texts[i] : content.token_ids[i]) }), ` token ${content.token_ids[i]}, number ${i + 1}`, ...facts);
  });
  if (!content.token_ids.length) return [];
  const choose = h("select", { attributes: { "aria-label": "colour of the tokens" }, onchange: (event) => { state.colour = event.target.value; paint(); } },
    names.map((name) => h("option", { value: name, textContent: TRACKS[name][0], selected: name === state.colour })));
  legend.replaceChildren("decoding the tokens …");
  const note = h("p", { className: "quiet" });
  get("tokens", place).then((found) => {
    if (!same(state.selected, place)) return;
    if (!found.texts) note.textContent = `The text of each token is not known: ${found.note}`;
    if (found.texts || content.response === null) write(found.texts);
    else {
      legend.replaceChildren(h("button", { textContent: "show the ids of the tokens in colour", onclick: () => write(null) }));
    }
  }).catch(fail);
  return [h("h3", { textContent: "answer" }), h("div", { className: "bar" }, h("label", { className: "line quiet" }, "colour", choose)), legend, note, box, hover];
}

async function showDiff() {
  const [first, second] = state.compared;
  const [a, b, { parts, cut }] = await Promise.all([get("rollout", first), get("rollout", second),
    get("diff", { ...first, other_run: second.run, other_file: second.file, other_row: second.row })]);
  const name = (place, content) => `${state.runs.length > 1 ? `${state.runs[place.run].name} · ` : ""}${place.file.replace(/\.\w+$/, "")} · prompt ${content.prompt_id} sample ${content.sample_index} · reward ${short(content.reward)}`;
  const tags = { same: "span", removed: "del", added: "ins" };
  openDetail(
    h("div", { className: "bar" }, h("h2", { textContent: "two answers" }), h("button", { className: "right", textContent: "×", title: "close", onclick: closeDetail })),
    h("p", {}, h("del", { textContent: name(first, a) }), h("br"), h("ins", { textContent: name(second, b) })),
    a.prompt === b.prompt ? h("p", { className: "quiet", textContent: "The prompts are the same." }) : h("p", { className: "bad", textContent: "The prompts differ." }),
    ...(cut ? [h("p", { className: "quiet", textContent: "The texts are long; their first words are compared." })] : []),
    h("div", { className: "tokens" }, parts.map(([kind, text]) => h(tags[kind], { textContent: text }))));
}

document.addEventListener("keydown", (event) => {
  if (state.tab !== "rollouts" || /^(INPUT|SELECT)$/.test(event.target.tagName)) return;
  if (event.key === "Escape") return closeDetail();
  const by = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
  const at = state.rows.findIndex((row) => same(row, state.selected));
  const next = by && state.rows[at + by];
  if (!next || !state.selected) return;
  event.preventDefault();
  guarded(showDetail)(placeOf(next)).then(() => document.querySelector("#table tr[aria-selected=true]")?.scrollIntoView({ block: "nearest" }));
});

// Errors and runs --------------------------------------------------------------------------------------------

async function showErrors() {
  const rows = await get("errors");
  $("errors").replaceChildren(rows.length ? h("table", {},
    h("thead", {}, h("tr", {}, ["rollouts", "outcome", "error", "steps", ""].map((title) => h("th", { textContent: title })))),
    h("tbody", {}, rows.map((row) => h("tr", {},
      h("td", { className: "number", textContent: count(row.count) }), h("td", {}, h("span", { className: "chip bad", textContent: row.outcome })),
      h("td", { className: "error", textContent: row.error }), h("td", { className: "number", textContent: row.first === row.last ? row.first : `${row.first} to ${row.last}` }),
      h("td", {}, h("button", { textContent: "show", onclick: () => {
        state.search = { failed: "true", error: (row.error || "").slice(0, 200) };
        open("rollouts");
      } })))))) : h("p", { className: "quiet", textContent: "No rollout failed." }));
}

async function showComparison() {
  const { flags, warnings } = await get("comparison");
  const names = Object.keys(flags);
  const head = (run, i) => h("th", {}, h("span", { className: "line" }, swatch(i), run.name));
  $("comparison").replaceChildren(
    h("h2", { textContent: state.runs.length < 2 ? "One run" : names.length ? `${names.length} flags differ` : "No flag differs" }),
    ...(names.length ? [h("table", {}, h("thead", {}, h("tr", {}, h("th", { textContent: "flag" }), state.runs.map(head))),
      h("tbody", {}, names.map((name) => h("tr", {}, h("td", { textContent: `--${name}` }), flags[name].map((value) => h("td", { textContent: value ?? "–" }))))))] : []),
    ...state.runs.flatMap((run, i) => [
      h("h2", { className: "line" }, swatch(i), run.name), h("p", { className: "quiet", textContent: run.path }),
      ...run.notes.map((note) => h("p", { className: "bad", textContent: note })),
      warnings[i].length ? h("table", {}, h("tbody", {}, warnings[i].map((row) => h("tr", {}, h("td", { className: "number", textContent: `step ${row.step}` }), h("td", { textContent: row.text })))))
        : h("p", { className: "quiet", textContent: "no warnings" }),
    ]));
}

// Start ------------------------------------------------------------------------------------------------------

$("metric-search").addEventListener("input", drawMetricList);
const showSmoothing = () => { $("smoothing-value").textContent = `${Math.round(100 * $("smoothing").value)} %`; };
$("smoothing").value = state.smoothing;
showSmoothing();
$("smoothing").addEventListener("input", showSmoothing);
$("smoothing").addEventListener("change", guarded((event) => {
  state.smoothing = event.target.value;
  return loadCurves();
}));
$("log-scale").addEventListener("change", (event) => { state.log = event.target.checked; drawCharts(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);

guarded(async () => {
  recall();
  drawTabs();
  await poll();
  const noMetrics = state.runs.every((run) => run.last_step === null);
  await open(noMetrics && state.tab === "curves" ? "rollouts" : state.tab);
})();
setInterval(() => { if (!document.hidden) guarded(poll)(); }, POLL);
