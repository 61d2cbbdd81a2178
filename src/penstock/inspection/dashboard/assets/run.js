// One run: its head, and six views of it.

const TABS = [
  ["overview", "Overview"],
  ["samples", "Samples"],
  ["pairs", "First and last"],
  ["journal", "Journal"],
  ["timeline", "Timeline"],
  ["settings", "Settings"],
];

// The sections of a view read these.
let runs = [];
let several = false; // they share the charts, and have a row each in one table
// What `runs` are: the models of a service are drawn as runs that are compared.
const KINDS = {
  run: { charts: CHARTS, rows: figureRows, head: "Run", absent: "No step is done yet." },
  model: { charts: MODEL_CHARTS, rows: modelRows, head: "Model", absent: "No model is made yet." },
};
let kind = KINDS.run;
const shownRuns = () => runs.filter((run) => run.shown);
const LONG_RUN = 150; // runs of more steps show smoothed curves, with the raw curve faint behind
const view = { smoothing: 0, chosen: false };

function takeRuns(records, name) {
  const before = new Map(runs.map((run) => [run.id, run.shown]));
  runs = records.map((record, i) => ({ ...record, index: (record.index ?? i) % MOST_COMPARED, shown: before.get(record.id) ?? i < MOST_COMPARED }));
  kind = KINDS[name];
  several = runs.length > 1 || name === "model";
  if (!view.chosen) view.smoothing = Math.max(...runs.map((run) => run.steps.length)) > LONG_RUN ? 0.9 : 0;
}

document.addEventListener("input", (event) => {
  if (event.target.type === "range") view.chosen = true;
});

function runHead(line) {
  const report = saved || line.service ? null : html("a", { class: "button", href: `/report/${line.id}`, target: "_blank", rel: "noopener" }, "Report");
  const tabs = (line.service ? [] : TABS).map(([name, text], i) =>
    html("a", { href: `#/run/${line.id}/${name}`, class: state.tab === name ? "on" : "", title: `${text} (${i + 1})`, "aria-current": state.tab === name ? "page" : false }, text),
  );
  return html(
    "header",
    { class: "run-head" },
    html("div", { class: "run-title" }, html("h1", {}, line.name), saved && line.state === "training" ? null : chip(line.state), html("span", { class: "spring" }), report),
    html("nav", { class: "tabs", "aria-label": "Views" }, ...tabs),
  );
}

const reading = () => html("p", { class: "absent" }, "Reading …");

// -- overview -----------------------------------------------------------------------------------

// Sections are built again only when another chart appears; a new step redraws the charts in place.
function overviewView(run, get = () => read(`/api/run/${run}/overview`).then((found) => found && [found]), name = "run") {
  const top = html("div", {}, reading());
  const curves = html("div", {});
  let drawn = "";
  let waiting = 0;

  async function load() {
    clearTimeout(waiting);
    const records = await get();
    if (!records || !top.isConnected) return;
    takeRuns(records, name);
    top.replaceChildren(
      ...[
        several ? null : settingList(runs[0].settings),
        ...notices(),
        findingsSection(),
        runs.some((one) => one.steps.length) || (several && runs.length) ? keyFigures() : html("p", { class: "absent" }, kind.absent),
      ].filter(Boolean),
    );
    const names = kind.charts.filter((chart) => pointsOf(chart).some((point) => point.y !== 0)).map((chart) => chart.name);
    const shape = JSON.stringify([names, dataShown().map((chart) => chart.title), runs.map((one) => one.id)]);
    if (shape !== drawn) {
      figures.length = 0;
      curves.replaceChildren(...[names.length ? learningSection() : null, dataSection()].filter(Boolean));
      drawn = shape;
    }
    redraw();
    const again = Math.max(...records.map((record) => record.again_in_s || 0));
    if (again) waiting = setTimeout(load, 1000 * again);
  }
  load();
  // a report can be read from top to bottom
  const samples = saved && run ? section("Samples", null, samplesView(run).node) : null;
  return { node: html("div", {}, top, curves, samples), update: load };
}

// -- journal ------------------------------------------------------------------------------------

const FLOW = [["drawn", "drawn"], ["in_flight", "in flight"], ["buffered", "buffered"], ["taken", "in this step"], ["trained", "trained"], ["dropped", "dropped"]];

function flow(counts) {
  return Object.entries(counts).map(([task, row]) =>
    html(
      "div",
      { class: "flow" },
      html("h3", {}, task),
      html("ol", {}, ...FLOW.map(([name, text]) => html("li", { class: name, "data-count": row[name] || 0 }, html("b", {}, (row[name] || 0).toLocaleString("en-US")), html("span", {}, text)))),
    ),
  );
}

const moment = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");

function eventTable(events) {
  const rows = events.map((event) => {
    const facts = [event.reason, event.step ? `step ${event.step}` : null, event.reward === null ? null : `reward ${number(event.reward)}`].filter(Boolean);
    return html("tr", {}, html("td", { class: "soft" }, moment(event.at)), html("td", {}, event.kind), html("td", { class: "id" }, event.group_id), html("td", { class: "wide" }, facts.join(" · ")));
  });
  return html("div", { class: "scroll" }, html("table", { class: "events" }, html("tbody", {}, ...rows)));
}

function weightTable(weights) {
  const rows = weights.map((row) =>
    html("tr", {}, html("th", { scope: "row" }, row.kind === "published" ? "published by the trainer" : `confirmed by ${row.engine}`), html("td", {}, `version ${row.version}`), html("td", { class: "soft" }, moment(row.at))),
  );
  return html("table", { class: "drops" }, html("tbody", {}, ...rows));
}

function journalView(run) {
  const node = html("div", {}, reading());
  let waiting = 0;
  async function load() {
    clearTimeout(waiting);
    const found = await read(`/api/run/${run}/journal`);
    if (!found || !node.isConnected) return;
    const engines = found.weights.length ? section("Weights", null, html("div", { class: "card" }, weightTable(found.weights))) : null;
    node.replaceChildren(...[section("Groups", null, ...flow(found.counts)), engines, section("Newest events", null, eventTable(found.events))].filter(Boolean));
    if (found.again_in_s) waiting = setTimeout(load, 1000 * found.again_in_s);
  }
  load();
  return { node, update: load };
}

// -- timeline -----------------------------------------------------------------------------------

const LANE = 26;

// Each lane is a strip: how much of every moment the part was busy, and how much it waited. Drag to zoom.
function timelineView(run) {
  const body = html("div", { class: "lanes" }, reading());
  const whole = html("button", { type: "button", hidden: "" }, "Whole run");
  const note = html("p", { class: "quiet-text" });
  const readNewest = newest();
  let range = { from: 0, to: 0 };
  let found = null;
  async function load() {
    const answer = await readNewest(`/api/run/${run}/timeline?${new URLSearchParams(range)}`);
    if (!answer || !body.isConnected) return;
    found = answer;
    draw();
  }
  whole.addEventListener("click", () => zoom(0, 0));
  const zoom = (from, to) => {
    range = { from, to };
    load();
  };
  const draw = () => drawLanes(body, found, zoom, whole, note, range);
  load();
  const head = html("div", { class: "section-head" }, key([["produce block", "busy"], ["wait block", "waiting"]]), html("div", { class: "controls" }, whole));
  return { node: html("section", {}, head, body, note), update: () => range.to || load(), draw: () => found && draw() };
}

function drawLanes(body, found, zoom, whole, note, range) {
  body.replaceChildren();
  if (!found.lanes.length) return absent(body);
  whole.hidden = !range.to;
  note.textContent = `${clock(found.start)} to ${clock(found.end)} of ${duration(found.total)}${found.sessions > 1 ? `, in ${found.sessions} sessions, without the pauses between them` : ""}.${saved ? "" : " Drag over a part to see it larger."}`;
  for (const lane of found.lanes) {
    const canvas = html("canvas", { class: "lane-strip", "data-lane": lane.name, height: LANE });
    body.append(html("div", { class: "lane-row" }, html("div", { class: "lane-name" }, html("b", {}, lane.name), html("span", { class: "soft" }, lane.verdict)), canvas));
    paintLane(canvas, lane, found);
    if (!saved) dragToZoom(canvas, found, zoom);
  }
  body.append(clockAxis(body, found));
}

function paintLane(canvas, lane, found) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.width = width * ratio;
  canvas.height = LANE * ratio;
  const style = getComputedStyle(document.documentElement);
  const draw = canvas.getContext("2d");
  draw.scale(ratio, ratio);
  const slot = width / lane.busy.length;
  lane.busy.forEach((busy, i) => {
    const tall = (LANE * busy) / 100;
    const wait = (LANE * lane.waiting[i]) / 100;
    draw.fillStyle = style.getPropertyValue("--produce");
    draw.fillRect(i * slot, LANE - tall, slot + 0.3, tall);
    draw.fillStyle = style.getPropertyValue("--wait");
    draw.fillRect(i * slot, LANE - Math.min(LANE, tall + wait), slot + 0.3, Math.min(LANE - tall, wait));
  });
  hover(canvas, (event) => {
    const at = Math.floor(((event.clientX - canvas.getBoundingClientRect().left) / width) * lane.busy.length);
    if (at < 0 || at >= lane.busy.length) return null;
    const when = found.start + ((at + 0.5) / lane.busy.length) * (found.end - found.start);
    return [`${lane.name}, ${clock(when)}`, [["produce block", "busy", `${lane.busy[at]} %`], ["wait block", "waiting", `${lane.waiting[at]} %`]]];
  });
}

function dragToZoom(canvas, found, zoom) {
  let from = null;
  const share = (event) => {
    const box = canvas.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
  };
  const when = (at) => found.start + at * (found.end - found.start);
  canvas.addEventListener("pointerdown", (event) => {
    from = share(event);
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", (event) => {
    const to = share(event);
    if (from !== null && Math.abs(to - from) > 0.01) zoom(when(Math.min(from, to)), when(Math.max(from, to)));
    from = null;
  });
}

// Round moments: whole seconds, minutes or hours.
function clockMarks(total, count) {
  const steps = [0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400];
  const step = steps.find((one) => total / one <= count) || 86400 * Math.ceil(total / 86400 / count);
  return Array.from({ length: Math.floor(total / step) + 1 }, (_, i) => i * step);
}

function clockAxis(body, found) {
  const strip = body.querySelector("canvas");
  const width = strip.clientWidth;
  const span = found.end - found.start;
  const x = scale(found.start, found.end, 0, width);
  const marks = clockMarks(span, width / 90).map((mark) => found.start + mark);
  const texts = marks.map((mark, i) => svg("text", { class: "tick", x: x(mark), y: 14, "text-anchor": i === 0 ? "start" : x(mark) > width - 30 ? "end" : "middle" }, clock(mark)));
  return html("div", { class: "lane-row" }, html("div", { class: "lane-name" }), svg("svg", { width, height: 20 }, ...texts));
}

// -- settings -----------------------------------------------------------------------------------

function settingsView(run) {
  const node = html("div", {}, reading());
  read(`/api/run/${run}/overview`).then((record) => {
    if (!record) return;
    node.replaceChildren(html("p", { class: "quiet-text" }, record.path), html("pre", { class: "config card" }, record.config || "The settings cannot be read."));
  });
  return { node, update: () => {} };
}

const VIEWS = { overview: overviewView, samples: samplesView, pairs: pairsView, journal: journalView, timeline: timelineView, settings: settingsView };
