// Charts made of rectangles: histograms, the pipeline's timeline, and the outcomes of the groups.

const MOST_SLOTS = 400; // a longer run's timeline is drawn in so many slots of several steps
const NARROW_SLOT = 6; // pixels

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

// One run's steps laid along the clock: what the trainer did, and how long the producer waited.
function drawTimeline(body, width, run) {
  const slots = timeSlots(run);
  if (!slots.length) return absent(body);
  const total = slots.at(-1).end;
  const x = scale(0, total, 1, width - 1);
  const lane = 26;
  const second = lane + 54; // top of the producer's lane
  const height = second + lane + 22;
  const picture = svg("svg", { width, height, role: "img", "data-chart": "timeline", "data-run": run.index });
  const marks = clockMarks(total, width / 90);
  picture.append(
    laneTitle("Trainer", run.figures.trainer_waited, 14, width),
    laneTitle("Producer", run.figures.producer_waited, second - 8, width),
    ...marks.map((mark) => svg("line", { class: "grid", x1: x(mark), x2: x(mark), y1: second + lane, y2: second + lane + 5 })),
    ...marks.map((mark) => svg("text", { class: "tick", x: x(mark), y: height - 4, "text-anchor": mark === 0 ? "start" : "middle" }, mark === 0 ? "0" : clock(mark))),
  );
  for (const slot of slots) {
    const group = svg(
      "g",
      { class: "slot", "data-step": slot.step, "data-trained": slot.busy, "data-trainer-waited": slot.trainer, "data-producer-waited": slot.producer },
      ...laneParts("train", slot, slot.trainer, x, 22, lane, true),
      ...laneParts("produce", slot, slot.producer, x, second, lane, false),
    );
    hover(group, () => [
      slot.steps > 1 ? `steps ${slot.step} to ${slot.step + slot.steps - 1}` : `step ${slot.step}`,
      [
        ["train", "trained", duration(slot.busy)],
        ["wait", "trainer waited", duration(slot.trainer)],
        ["wait", "producer waited", duration(slot.producer)],
      ],
    ]);
    picture.append(group);
  }
  body.append(picture);
}

// A wide slot is cut along the clock (the trainer waits first, then trains); in one too narrow for that
// the height of the waiting part is its share.
function laneParts(kind, slot, waited, x, top, lane, waitsFirst) {
  const share = Math.min(1, waited / (slot.end - slot.start || 1));
  const wide = x(slot.end) - x(slot.start) > NARROW_SLOT;
  const [from, to] = [x(slot.start), x(slot.end) - (wide ? 1 : 0)];
  const rect = (name, left, right, height) =>
    svg("rect", { class: name, x: left.toFixed(2), y: top, width: Math.max(0, right - left).toFixed(2), height: height.toFixed(2) });
  if (!wide) return [rect(kind, from, to + 0.3, lane), rect("wait", from, to + 0.3, lane * share)];
  const cut = waitsFirst ? from + (to - from) * share : to - (to - from) * share;
  if (waitsFirst) return [rect("wait", from, cut, lane), rect(kind, cut, to, lane)];
  return [rect(kind, from, cut, lane), rect("wait", cut, to, lane)];
}

// Round moments: whole seconds, minutes or hours.
function clockMarks(total, count) {
  const steps = [0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400];
  const step = steps.find((one) => total / one <= count) || 86400 * Math.ceil(total / 86400 / count);
  return Array.from({ length: Math.floor(total / step) + 1 }, (_, i) => i * step);
}

function laneTitle(name, waited, y, width) {
  const label = svg("text", { class: "lane", x: 1, y }, name);
  const share = svg("text", { class: "lane share", x: width - 1, y, "text-anchor": "end" }, `waited ${percent(waited)} of the time`);
  return svg("g", {}, label, share);
}

function timeSlots(run) {
  const seconds = run.curves["time/step_s"];
  if (!seconds) return [];
  const trainer = run.curves["time/consumer_wait_s"] || [];
  const producer = run.curves["time/producer_wait_s"] || [];
  const each = Math.ceil(seconds.length / MOST_SLOTS);
  const slots = [];
  let clock = 0;
  seconds.forEach((length, i) => {
    if (i % each === 0) slots.push({ step: run.steps[i], steps: 0, start: clock, end: clock, trainer: 0, producer: 0, busy: 0 });
    const slot = slots.at(-1);
    clock += length || 0;
    slot.end = clock;
    slot.steps += 1;
    slot.trainer += trainer[i] || 0;
    slot.producer += producer[i] || 0;
    slot.busy += Math.max(0, (length || 0) - (trainer[i] || 0));
  });
  return slots;
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
