// Charts made of rectangles, and tables: histograms, the outcomes of the groups, the figures of each task.

// Trained groups by staleness; runs side by side.
function drawStaleness(body, width, runs) {
  const known = runs.filter((run) => Object.keys(run.staleness).length);
  if (!known.length) return absent(body);
  const height = 190;
  const highest = Math.max(...known.flatMap((run) => Object.keys(run.staleness).map(Number)));
  const shares = known.map((run) => [run, Object.values(run.staleness).reduce((a, b) => a + b, 0)]);
  const x = scale(-0.5, highest + 0.5, MARGIN.left, width - MARGIN.right);
  x.marks = ticks(0, highest, Math.min(12, width / 40), true);
  const top = Math.max(...shares.flatMap(([run, total]) => Object.values(run.staleness).map((n) => n / total)));
  const y = shareScale(top, height);
  const picture = svg("svg", { width, height, role: "img", "data-chart": "staleness-histogram" });
  picture.append(...shareAxes(x, y, width, height));
  const slot = Math.min(72, (x(1) - x(0)) * 0.8);
  shares.forEach(([run, total], place) => {
    for (const [value, count] of Object.entries(run.staleness)) {
      const each = slot / shares.length;
      const bar = svg("rect", {
        class: `bar run-${run.index}`,
        x: (x(Number(value)) - slot / 2 + place * each + 0.5).toFixed(1),
        y: y(count / total).toFixed(1),
        width: Math.max(1, each - 1).toFixed(1),
        height: Math.max(0.5, y(0) - y(count / total)).toFixed(1),
        rx: 1.5,
        "data-run": run.index,
        "data-staleness": value,
        "data-count": count,
      });
      hover(bar, () => [`staleness ${value}`, [[`run-${run.index}`, run.name, `${number(count)} groups, ${percent(count / total)}`]]]);
      picture.append(bar);
    }
  });
  body.append(picture);
}

// Lengths of finished responses (dashed) against those that were trained (filled), as shares.
function drawLengths(body, width, runs) {
  const known = runs.filter((run) => run.lengths.length);
  if (!known.length) return absent(body);
  const height = 190;
  const longest = Math.max(...known.map((run) => run.lengths.at(-1)[0] + run.length_bin));
  const widest = Math.max(...known.map((run) => run.length_bin));
  const bin = Math.max(widest, Math.ceil(longest / 32));
  const bins = Math.ceil(longest / bin);
  const shapes = known.map((run) => ({ run, finished: binned(run, 1, bin, bins), trained: binned(run, 2, bin, bins) }));
  const top = Math.max(...shapes.flatMap(({ finished, trained }) => [...finished.shares, ...trained.shares]));
  const x = scale(0, bins * bin, MARGIN.left, width - MARGIN.right);
  x.marks = ticks(0, bins * bin, Math.min(6, width / 70), true);
  const y = shareScale(top, height);
  const picture = svg("svg", { width, height, role: "img", "data-chart": "lengths" });
  picture.append(...shareAxes(x, y, width, height));
  for (const { run, finished, trained } of shapes) {
    const attributes = { "data-run": run.index, "data-bin": bin };
    picture.append(
      svg("path", { ...attributes, class: `area run-${run.index}`, d: outline(trained.shares, bin, x, y), "data-counts": trained.counts.join(" ") }),
      svg("path", { ...attributes, class: `outline run-${run.index}`, d: outline(finished.shares, bin, x, y), "data-counts": finished.counts.join(" ") }),
    );
  }
  hover(picture, (event) => {
    const at = Math.floor(x.back(event.clientX - picture.getBoundingClientRect().left) / bin);
    if (at < 0 || at >= bins) return null;
    const rows = shapes.flatMap(({ run, finished, trained }) => [
      [`run-${run.index} dash`, "finished", `${number(finished.counts[at])}, ${percent(finished.shares[at])}`],
      [`run-${run.index}`, "trained", `${number(trained.counts[at])}, ${percent(trained.shares[at])}`],
    ]);
    return [bin === 1 ? `${at} tokens` : `${at * bin} to ${(at + 1) * bin - 1} tokens`, rows];
  });
  body.append(key([["ink block", "trained"], ["ink dash", "finished"]]), picture);
}

function binned(run, column, bin, bins) {
  const counts = new Array(bins).fill(0);
  for (const row of run.lengths) counts[Math.floor(row[0] / bin)] += row[column];
  const total = counts.reduce((a, b) => a + b, 0) || 1;
  return { counts, shares: counts.map((count) => count / total) };
}

function outline(shares, bin, x, y) {
  const corners = shares.map((share, i) => `V${y(share).toFixed(1)}H${x((i + 1) * bin).toFixed(1)}`);
  return `M${x(0).toFixed(1)} ${y(0).toFixed(1)}${corners.join("")}V${y(0).toFixed(1)}`;
}

function shareScale(top, height) {
  const map = scale(0, top * 1.08 || 1, height - MARGIN.bottom, MARGIN.top);
  map.marks = ticks(0, top * 1.08 || 1, 5);
  return map;
}

function shareAxes(x, y, width, height) {
  const named = axes(x, { ...y, marks: [] }, width, height);
  const lines = y.marks.flatMap((mark) => [
    svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(mark), y2: y(mark) }),
    svg("text", { class: "tick", x: MARGIN.left - 8, y: y(mark) + 3.5, "text-anchor": "end" }, `${number(100 * mark)} %`),
  ]);
  return [...lines, ...named];
}

// Every drawn group has one outcome, so the widths add up to the whole bar.
const FATES = ["trained", "taken", "buffered", "in_flight", "dropped"];

function drawFates(body, width, runs) {
  const known = runs.filter((run) => Object.keys(run.groups).length);
  if (!known.length) return absent(body);
  for (const run of known) {
    const total = run.figures.drawn;
    const picture = svg("svg", { width, height: 22, role: "img", "data-chart": "fates", "data-run": run.index });
    let at = 0;
    for (const fate of FATES.filter((name) => run.groups[name])) {
      const count = run.groups[fate];
      const size = Math.max(3, (count / total) * (width - 12));
      const bar = svg("rect", { class: `fate ${fate}`, x: at.toFixed(1), y: 0, width: size.toFixed(1), height: 22, "data-fate": fate, "data-count": count });
      hover(bar, () => [fateName(fate), [[`fate ${fate}`, run.name, `${number(count)} of ${number(total)} groups`]]]);
      picture.append(bar);
      at += size + 1;
    }
    if (runs.length > 1) body.append(html("p", { class: `run-label run-${run.index}` }, html("span", { class: `swatch run-${run.index}` }), run.name));
    body.append(picture, fateKey(run), dropTable(run));
  }
}

const fateName = (fate) => fate.replace("_", " ");

function fateKey(run) {
  const entries = FATES.filter((name) => run.groups[name]);
  return key(entries.map((fate) => [`fate block ${fate}`, `${fateName(fate)} ${run.groups[fate].toLocaleString("en-US")}`]));
}

function dropTable(run) {
  const reasons = Object.entries(run.drops);
  if (!reasons.length) return html("p", { class: "quiet-text" }, "No group was dropped.");
  const most = Math.max(...reasons.map(([, count]) => count));
  const rows = reasons.map(([reason, count]) => {
    const bar = html("span", { class: "drop-bar" });
    bar.style.width = `${(100 * count) / most}%`;
    return html(
      "tr",
      { "data-drop": reason, "data-count": count },
      html("th", { scope: "row" }, `dropped: ${reason}`),
      html("td", {}, count.toLocaleString("en-US")),
      html("td", { class: "drop-cell" }, bar),
    );
  });
  return html("table", { class: "drops" }, html("tbody", {}, ...rows));
}

// What each task produced: one row per figure, one column per task.
function drawAccounts(body, width, runs) {
  const known = runs.filter((run) => Object.keys(run.accounts).length);
  if (!known.length) return absent(body);
  for (const run of known) {
    const tasks = Object.keys(run.accounts);
    const figures = [...new Set(tasks.flatMap((task) => Object.keys(run.accounts[task])))];
    const head = html("tr", {}, html("th", { scope: "col" }, several ? run.name : ""), ...tasks.map((task) => html("th", { scope: "col" }, task)));
    const rows = figures.map((name) =>
      html(
        "tr",
        { "data-account": name },
        html("th", { scope: "row" }, name.replaceAll("_", " ").replace("part/", "reward part: ")),
        ...tasks.map((task) => html("td", {}, name in run.accounts[task] ? number(run.accounts[task][name]) : "–")),
      ),
    );
    body.append(html("table", { class: "drops" }, html("thead", {}, head), html("tbody", {}, ...rows)));
  }
}

function hover(node, content) {
  node.addEventListener("pointermove", (event) => {
    const found = content(event);
    if (found) showTip(event, ...found);
    else hideTip();
  });
  node.addEventListener("pointerleave", hideTip);
}

const absent = (body) => {
  body.append(html("p", { class: "absent" }, "Not in this run folder."));
};
