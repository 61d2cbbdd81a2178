// The list of runs: a row for each, with its state, its curve, and whether something is wrong.

const SPARK = { width: 86, height: 24 };

function spark(values) {
  const picture = svg("svg", { class: "spark", width: SPARK.width, height: SPARK.height, "aria-hidden": "true" });
  if (values.length < 2) return picture;
  const [low, high] = extent(values);
  const x = scale(0, values.length - 1, 1, SPARK.width - 3);
  const y = scale(low, high === low ? low + 1 : high, SPARK.height - 3, 3);
  const d = values.map((value, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  picture.append(svg("path", { class: "line", d }), svg("circle", { class: "dot", cx: x(values.length - 1), cy: y(values.at(-1)), r: 2.2 }));
  return picture;
}

const chip = (state) => html("span", { class: `chip ${state}` }, state);

function ago(seconds) {
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) if (passed >= size) return `${Math.round(passed / size)} ${unit} ago`;
  return "now";
}

// "heldout accuracy 0.344 -> 0.977", shorter.
function heldOutNow(line) {
  const newest = line.held_out.match(/-> (\S+)$/);
  return newest ? `held out ${newest[1]}` : "";
}

function serviceFacts(line) {
  const { model, models, waiting, last } = line.service;
  const facts = [`${models} ${models === 1 ? "model" : "models"} of ${model}`, `${waiting} waiting, last ${last || "command: none"} ${ago(line.changed_at)}`];
  return html("span", { class: "row-facts" }, html("span", {}, facts[0]), html("span", { class: "soft" }, facts[1]));
}

function runRow(line) {
  const box = html("input", { type: "checkbox", disabled: saved || line.service ? "" : null, "aria-label": `choose ${line.name} for a comparison`, title: "Compare (x)" });
  box.checked = state.chosen.includes(line.id);
  box.addEventListener("input", () => choose(line.id));
  const steps = line.total_steps ? `${line.steps} / ${line.total_steps}` : String(line.steps);
  const done = html("span", { class: "done" });
  done.style.width = `${line.total_steps ? Math.min(100, (100 * line.steps) / line.total_steps) : 0}%`;
  const findings = line.findings ? html("span", { class: "badge", title: "findings" }, String(line.findings)) : null;
  const reward = line.reward === null ? "–" : line.reward.toFixed(3);
  const link = html(
    "a",
    { href: `#/run/${line.id}`, tabindex: -1 },
    html("span", { class: "row-head" }, html("span", { class: "row-name" }, line.name), findings, chip(line.state)),
    line.note
      ? html("span", { class: "row-note" }, line.note)
      : line.service
      ? serviceFacts(line)
      : html(
          "span",
          { class: "row-body" },
          spark(line.rewards),
          html(
            "span",
            { class: "row-facts" },
            html("span", {}, html("span", { class: "soft" }, "reward "), reward),
            html("span", { class: "soft", title: line.held_out }, heldOutNow(line) || `changed ${ago(line.changed_at)}`),
          ),
          html("span", { class: "row-steps" }, html("span", {}, steps), html("span", { class: "track" }, done)),
        ),
  );
  const classes = ["row", line.id === state.open ? "open" : "", line.id === state.cursor ? "cursor" : ""].join(" ");
  return html("li", { class: classes, "data-run-id": line.id, "data-state": line.state }, box, link);
}

// The runs that the filter keeps; those under way first, then the newest.
function listed() {
  const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const keeps = (line) => words.every((word) => `${line.name} ${line.state} ${line.held_out}`.toLowerCase().includes(word));
  const rank = (line) => (["training", "serving"].includes(line.state) ? 0 : 1);
  return [...state.lines.values()].filter(keeps).sort((a, b) => rank(a) - rank(b) || b.changed_at - a.changed_at);
}

function drawList() {
  const lines = listed();
  byId("rows").replaceChildren(...lines.map(runRow));
  const all = state.lines.size;
  const text = lines.length === all ? `${all} ${all === 1 ? "run" : "runs"}` : `${lines.length} of ${all} runs`;
  byId("count").textContent = state.complete ? text : `${text}, reading …`;
  const button = byId("compare");
  button.hidden = state.chosen.length < 2;
  button.textContent = `Compare ${state.chosen.length}`;
}

function moveCursor(by) {
  const ids = listed().map((line) => line.id);
  if (!ids.length) return;
  const at = ids.indexOf(state.cursor ?? state.open);
  state.cursor = ids[Math.max(0, Math.min(ids.length - 1, at < 0 ? 0 : at + by))];
  drawList();
  const row = document.querySelector(".row.cursor");
  if (row) row.scrollIntoView({ block: "nearest" });
}

function choose(id) {
  if (saved || !state.lines.has(id) || state.lines.get(id).service) return; // a report compares all of its runs
  if (state.chosen.includes(id)) state.chosen = state.chosen.filter((one) => one !== id);
  else state.chosen = [...state.chosen, id].slice(-MOST_COMPARED);
  drawList();
  if (location.hash.startsWith("#/compare/") && state.chosen.length > 1) openComparison();
}
