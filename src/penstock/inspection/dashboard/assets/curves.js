// Curves over steps: lines, confidence bands, markers, and the values under the pointer.

const MARGIN = { top: 10, right: 14, bottom: 26, left: 46 };
const MOST_DOTS = 150; // more points than this are drawn as a line without dots
const VISIBLE_DOTS = 25; // up to so many, each point is shown

// series: [{ run, name, dashed (false, true or "dotted"), markers, points: [{ x, y, low, high }] }]
// options: { name, low, high, zero, smoothing, height, show }
function drawCurves(body, width, series, options) {
  const drawn = series.filter((one) => one.points.length);
  if (!drawn.length) {
    body.append(html("p", { class: "absent" }, "Not logged."));
    return;
  }
  const height = options.height || 190;
  const all = drawn.flatMap((one) => one.points);
  const x = xScale(all, width);
  const y = yScale(all, height, options);
  const picture = svg("svg", { width, height, role: "img", "data-chart": options.name });
  picture.append(...axes(x, y, width, height));
  for (const one of drawn) picture.append(drawSeries(one, x, y, options));
  const rule = svg("line", { class: "rule", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
  picture.append(rule);
  followPointer(picture, rule, drawn, x, options);
  body.append(picture);
}

function xScale(points, width) {
  const [low, high] = extent(points.map((point) => point.x));
  const map = scale(low, low === high ? low + 1 : high, MARGIN.left, width - MARGIN.right);
  map.marks = ticks(low, low === high ? low + 1 : high, Math.min(6, width / 80), true);
  return map;
}

function yScale(points, height, options) {
  const values = points.flatMap((p) => [p.y, p.low, p.high]).filter((value) => value !== null && value !== undefined);
  let [low, high] = extent(values);
  if (options.zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  const pad = (high - low || Math.abs(high) || 1) * 0.06;
  const bottom = options.low ?? (options.zero && low === 0 ? 0 : low - pad);
  const top = options.high ?? high + pad;
  const map = scale(bottom, top, height - MARGIN.bottom, MARGIN.top);
  map.marks = low === 0 && high === 0 ? [0] : ticks(bottom, top, height / 36);
  return map;
}

function axes(x, y, width, height) {
  const lines = y.marks.map((mark) =>
    svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(mark), y2: y(mark) }),
  );
  const left = y.marks.map((mark) =>
    svg("text", { class: "tick", x: MARGIN.left - 8, y: y(mark) + 3.5, "text-anchor": "end" }, number(mark)),
  );
  const below = x.marks.map((mark) => {
    const overflows = x(mark) + 3.3 * number(mark).length > width;
    return svg("text", { class: "tick", x: overflows ? width : x(mark), y: height - 8, "text-anchor": overflows ? "end" : "middle" }, number(mark));
  });
  return [...lines, ...left, ...below];
}

function drawSeries(one, x, y, options) {
  const group = svg("g", { class: `series run-${one.run}${one.dashed ? " dashed" : ""} ${one.dashed === "dotted" ? "dotted" : ""}`, "data-series": one.name });
  const points = one.points;
  const smooth = options.smoothing > 0 && !one.markers ? smoothed(points, options.smoothing) : null;
  const banded = points.some((point) => point.low !== null && point.low !== undefined);
  if (banded) group.append(band(points, x, y));
  if (!smooth || !banded) group.append(svg("path", { class: smooth ? "line raw" : "line", d: path(points, x, y) }));
  if (smooth) group.append(svg("path", { class: "line", d: path(smooth, x, y) }));
  if (points.length <= MOST_DOTS) group.append(...dots(one, x, y, options));
  return group;
}

function dots(one, x, y, options) {
  const visible = one.markers || (one.points.length <= VISIBLE_DOTS && !options.smoothing);
  return one.points.map((point) =>
    svg("circle", {
      class: visible ? "dot" : "dot quiet",
      cx: x(point.x).toFixed(1),
      cy: y(point.y).toFixed(1),
      r: one.markers ? 3.2 : 2,
      "data-chart": options.name,
      "data-series": one.name,
      "data-run": one.run,
      "data-step": point.x,
      "data-value": point.y,
    }),
  );
}

const path = (points, x, y) =>
  points.map((point, i) => `${i ? "L" : "M"}${x(point.x).toFixed(1)} ${y(point.y).toFixed(1)}`).join("");

function band(points, x, y) {
  const known = points.filter((point) => point.low !== null && point.high !== null);
  const edge = [...known.map((p) => [p.x, p.high]), ...known.reverse().map((p) => [p.x, p.low])];
  return svg("polygon", { class: "band", points: edge.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ") });
}

// Exponential mean with the bias of its start taken out.
function smoothed(points, weight) {
  let mean = 0;
  let total = 0;
  return points.map((point) => {
    mean = weight * mean + (1 - weight) * point.y;
    total = weight * total + (1 - weight);
    return { x: point.x, y: mean / total };
  });
}

function followPointer(picture, rule, drawn, x, options) {
  const steps = [...new Set(drawn.flatMap((one) => one.points.map((point) => point.x)))].sort((a, b) => a - b);
  picture.addEventListener("pointermove", (event) => {
    const wanted = x.back(event.clientX - picture.getBoundingClientRect().left);
    const step = steps.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best));
    rule.setAttribute("x1", x(step));
    rule.setAttribute("x2", x(step));
    rule.setAttribute("visibility", "visible");
    const rows = drawn
      .map((one) => [one, one.points.find((point) => point.x === step)])
      .filter(([, point]) => point)
      .map(([one, point]) => [`run-${one.run} ${one.dashed ? "dash" : ""} ${one.dashed === "dotted" ? "dotted" : ""}`, one.label, pointText(point)]);
    showTip(event, `${options.x ?? "step"} ${step}`, rows);
  });
  picture.addEventListener("pointerleave", () => {
    rule.setAttribute("visibility", "hidden");
    hideTip();
  });
}

function pointText(point) {
  const text = number(point.y, 4);
  if (point.low === null || point.low === undefined) return text;
  return `${text} (${number(point.low)} to ${number(point.high)})`;
}
