// Sections of a view: findings, key figures, curves, data.
// They show the page's `runs`; `several` says whether it has more than one, and `view` how it draws.

const CHARTS = [
  { name: "accuracy", title: "Accuracy", text: "Share of right answers; held-out with its 95 % interval.", low: 0, high: 1, wide: true },
  { name: "reward/mean", title: "Reward", text: "Mean over the rollouts of a step.", wide: true },
  { name: "response_length/mean", title: "Response length", text: "Mean tokens of a response." },
  { name: "staleness", title: "Staleness", text: "Updates since sampling, by the oldest token.", zero: true },
  { name: "loss/demonstration", title: "Loss", text: "Cross-entropy of the demonstrations, a token." },
  { name: "loss/policy", title: "Loss", text: "Of the policy; look at jumps, not at its size." },
  { name: "entropy/mean", title: "Entropy", text: "Of the policy, per token, in nats.", zero: true },
  { name: "kl/mean", title: "KL", text: "From the reference policy, per token.", zero: true },
  { name: "clip/fraction", title: "Clip fraction", text: "Tokens whose ratio was clipped.", zero: true },
  { name: "grad_norm", title: "Gradient norm", text: "Before clipping.", zero: true },
  { name: "groups/zero_variance", title: "Groups without variance", text: "Share whose rewards are all the same.", zero: true },
  { name: "prompts", title: "Prompts", text: "Share whose newest group was all right, mixed or all wrong.", low: 0, high: 1 },
  { name: "tokens/s", title: "Generation speed", text: "Tokens per second of a step.", zero: true },
  { name: "waited", title: "Waiting", text: "Share of a step's time that a side waited.", low: 0, high: 1 },
  { name: "mismatch/kl", title: "Mismatch", text: "KL of the engine against the trainer.", zero: true },
];

function speed(run) {
  const tokens = run.curves["tokens/generated"];
  const seconds = run.curves["time/step_s"];
  return tokens && seconds && tokens.map((count, i) => (count !== null && seconds[i] ? count / seconds[i] : null));
}

// The smallest and the largest value, where a point of a long run stands for several steps.
function between(run, name, i) {
  const spread = run.spread && run.spread[name];
  return spread ? { low: spread[0][i], high: spread[1][i] } : {};
}

// The share of a step's time that one side waited.
function waited(run, name) {
  const seconds = run.curves["time/step_s"];
  const waits = run.curves[name];
  return seconds && waits && waits.map((wait, i) => (wait !== null && seconds[i] ? Math.min(1, wait / seconds[i]) : null));
}

function seriesOf(chart, run) {
  const label = (text) => (several ? `${run.name}${text ? `, ${text}` : ""}` : text || chart.title);
  const derived = {
    "tokens/s": () => speed(run),
    "waited/trainer": () => waited(run, "time/consumer_wait_s"),
    "waited/producer": () => waited(run, "time/producer_wait_s"),
  };
  const values = (name) => (derived[name] ? derived[name]() : run.curves[name]) || [];
  const curve = (name, text, dashed) => ({
    run: run.index,
    name,
    label: label(text),
    dashed,
    points: values(name).map((y, i) => ({ x: run.steps[i], y, ...(dashed ? {} : between(run, name, i)) })).filter((point) => point.y !== null),
  });
  if (chart.name === "accuracy" || chart.name === "reward/mean") {
    const measure = chart.name === "accuracy" ? "accuracy" : "reward";
    const held = heldOut(run, measure).map(([task, rows]) => ({
      run: run.index,
      name: `eval/${task}`,
      label: label(task),
      markers: true,
      points: rows.map((row) => ({ x: row.step, y: row[measure], ...(measure === "accuracy" ? { low: row.low, high: row.high } : {}) })),
    }));
    return [...held, curve(`${measure}/mean`, held.length ? "training" : "", held.length > 0)];
  }
  if (chart.name === "staleness") return [curve("staleness/mean", "mean", false), curve("staleness/max", "largest", true)];
  if (chart.name === "prompts") return [curve("prompts/useful", "mixed", false), curve("prompts/solved", "all right", true), curve("prompts/hopeless", "all wrong", "dotted")];
  if (chart.name === "waited") return [curve("waited/trainer", "trainer", false), curve("waited/producer", "producer", true)];
  return [curve(chart.name, "", false)];
}

// The evaluation tasks that are measured by their accuracy, or, if nothing judges their answers, by their reward.
const heldOut = (run, measure) => Object.entries(run.evaluations).filter(([task]) => run.figures.measures[task] === measure);

function chartKey(chart) {
  if (chart.name === "prompts") return key([["ink", "mixed"], ["ink dash", "all right"], ["ink dotted", "all wrong"]]);
  if (chart.name === "waited") return key([["ink", "trainer"], ["ink dash", "producer"]]);
  if (chart.name === "staleness") return key([["ink", "mean"], ["ink dash", "largest"]]);
  const measure = { accuracy: "accuracy", "reward/mean": "reward" }[chart.name];
  const evaluated = runs.some((run) => heldOut(run, measure).length);
  return evaluated ? key([["ink", "held out"], ["ink dash", "training batches"]]) : null;
}

// A chart is drawn if it has something to show: a value that is not zero.
const pointsOf = (chart) => runs.flatMap((run) => seriesOf(chart, run).flatMap((one) => one.points));
const ALWAYS_DRAWN = ["accuracy", "reward/mean"];

function learningSection() {
  const logged = kind.charts.filter((chart) => pointsOf(chart).length);
  const drawn = logged.filter((chart) => ALWAYS_DRAWN.includes(chart.name) || pointsOf(chart).some((point) => point.y !== 0));
  const cards = drawn.map((chart) =>
    card(
      chart.title,
      chart.text,
      (body, width) => {
        const legend = chartKey(chart);
        if (legend) body.append(legend);
        const series = shownRuns().flatMap((run) => seriesOf(chart, run));
        const height = chart.wide ? 250 : 170;
        drawCurves(body, width, series, { ...chart, height: legend ? height - 22 : height, smoothing: view.smoothing });
      },
      { class: chart.wide ? "wide" : "" },
    ),
  );
  const names = (charts) => charts.map((chart) => chart.title.toLowerCase()).join(", ");
  const lines = [
    ["Not logged", kind.charts.filter((chart) => !logged.includes(chart))],
    ["Always 0", logged.filter((chart) => !drawn.includes(chart))],
  ].filter(([, charts]) => charts.length);
  const note = lines.length ? html("p", { class: "quiet-text" }, lines.map(([why, charts]) => `${why}: ${names(charts)}.`).join(" ")) : null;
  const slider = html("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: view.smoothing, "aria-label": "smoothing" });
  slider.addEventListener("input", () => {
    view.smoothing = Number(slider.value);
    redraw();
  });
  const control = html("label", { class: "control" }, "Smoothing", slider);
  return section("Learning", html("div", { class: "controls" }, runLegend(), control), html("div", { class: "grid-learning" }, ...cards), note);
}

const DATA = [
  { title: "Staleness", text: "Trained groups by the age of their oldest token.", of: (run) => run.staleness, draw: drawStaleness },
  { title: "Response lengths", text: "Trained against all that finished: a gap is a bias.", of: (run) => run.lengths, draw: drawLengths },
  { title: "Groups", text: "Every group that was drawn, by its fate.", of: (run) => run.groups, draw: drawFates },
  { title: "Tasks", text: "What each task produced over the run, aborted responses too.", of: (run) => run.accounts, draw: drawAccounts },
];

const dataShown = () => DATA.filter((chart) => runs.some((run) => Object.keys(chart.of(run)).length));

function dataSection() {
  const cards = dataShown().map((chart) => card(chart.title, chart.text, (body, width) => chart.draw(body, width, shownRuns())));
  if (!cards.length) return null;
  return section("Data", html("div", { class: "controls" }, runLegend()), html("div", { class: several ? "grid-data uneven" : "grid-data" }, ...cards));
}

// What is wrong with the runs, above everything else; nothing if nothing was found.
function findingsSection() {
  const found = runs.flatMap((run) => run.findings.map((finding) => ({ run, ...finding })));
  if (!found.length) return null;
  return html("div", { class: "findings" }, ...found.map(findingCard));
}

function findingCard(finding) {
  const since = finding.since ? `since step ${finding.since}` : "from the start";
  const change = finding.change.length ? html("pre", { class: "change" }, finding.change.join("\n")) : null;
  return html(
    "article",
    { class: "finding", "data-finding": finding.name, "data-since": finding.since },
    html("header", {}, html("h3", {}, finding.what), html("span", { class: "since" }, several ? `${finding.run.name}, ${since}` : since)),
    html("p", {}, finding.evidence),
    html("p", { class: "advice" }, finding.change.length ? `${finding.advice}:` : `${finding.advice}.`),
    change,
  );
}

const runLegend = () => (several ? key(runs.map((run) => [`run-${run.index}`, run.name])) : null);

function section(title, control, ...children) {
  return html("section", {}, html("div", { class: "section-head" }, html("h2", {}, title), control), ...children);
}

function notices() {
  const lines = runs.flatMap((run) => run.missing.map((text) => (several ? `${run.name}: ${text}` : text)));
  if (!lines.length) return [];
  return [html("aside", { class: "notice" }, html("strong", {}, "Not everything is here"), html("ul", {}, ...lines.map((line) => html("li", {}, line))))];
}

const settingList = (settings) =>
  html("dl", { class: "settings" }, ...Object.entries(settings).map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value))));

function change(value, text = number) {
  if (!value) return ["–"];
  return [html("span", { class: "from" }, `${text(value.first)} → `), text(value.last)];
}

function figureRows(run) {
  const f = run.figures;
  const steps = f.planned_steps && f.planned_steps !== f.steps ? `${f.steps} of ${f.planned_steps}` : String(f.steps);
  return [
    ...Object.entries(f.held_out).map(([task, value]) => [
      `${f.measures[task] === "accuracy" ? "Accuracy" : "Reward"} on ${task}`,
      change(value, (share) => share.toFixed(3)),
    ]),
    ["Reward", change(f.reward)],
    ["Steps", [steps, html("span", { class: "unit" }, ` in ${duration(f.seconds)}`)]],
    ["Generated", [number(f.tokens_per_s), html("span", { class: "unit" }, " tokens/s")]],
    ["Largest staleness", [number(f.largest_staleness)]],
    ["Trainer waited", [percent(f.trainer_waited)]],
    ["Producer waited", [percent(f.producer_waited)]],
    ["Groups dropped", [number(f.dropped), html("span", { class: "unit" }, ` of ${number(f.drawn)}`)]],
  ];
}

function keyFigures() {
  if (several) return comparison();
  const known = figureRows(runs[0]).filter(([, value]) => value[0] !== "–");
  const tiles = known.map(([name, value], i) =>
    html("div", { class: i < 2 ? "tile hero" : "tile" }, html("div", { class: "tile-name" }, name), html("div", { class: "tile-value" }, ...value)),
  );
  return html("div", { class: "tiles" }, ...tiles);
}

// Table of several runs: a row per run, with its figures; a click hides a run.
function comparison() {
  const columns = [...new Set(runs.flatMap((run) => kind.rows(run).map(([name]) => name)))];
  const head = [kind.head, ...columns].map((name) => html("th", { scope: "col" }, name));
  const body = runs.map((run) => {
    const values = Object.fromEntries(kind.rows(run));
    const box = html("input", { type: "checkbox", checked: "" });
    box.addEventListener("input", () => {
      run.shown = box.checked;
      redraw();
    });
    const name = html("label", { class: "run-name" }, box, html("span", { class: `swatch run-${run.index}` }), run.name);
    const cells = columns.map((column) => html("td", {}, ...(values[column] || ["–"])));
    return html("tr", {}, html("th", { scope: "row" }, name), ...cells);
  });
  return html("div", { class: "scroll" }, html("table", { class: "runs" }, html("thead", {}, html("tr", {}, ...head)), html("tbody", {}, ...body)));
}
