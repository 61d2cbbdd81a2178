"use strict";
// Building blocks: elements, numbers, scales.
// Text only ever enters the page through textContent and attributes, never as markup.

const byId = (id) => document.getElementById(id);
const saved = JSON.parse(byId("data").textContent); // what a report holds; null: a server is asked
const MOST_COMPARED = 8; // colours of runs

const SVG_SPACE = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "onclick" || name === "oninput") node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const html = (name, attributes, ...children) =>
  fill(document.createElement(name), attributes, children);

const svg = (name, attributes, ...children) =>
  fill(document.createElementNS(SVG_SPACE, name), attributes, children);

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6) return trim((value / 1e6).toPrecision(digits)) + "M";
  if (size >= 1e4) return trim((value / 1e3).toPrecision(digits)) + "k";
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  if (size < 1e-3) return value.toExponential(1).replace(".0e", "e").replace("e-", "e−");
  return trim(value.toPrecision(digits));
}

const trim = (text) => (text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text);
const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(100 * share)} %`);

// A moment on an axis, as short as can be: 40 s, 1:20, 2:05 h.
function clock(seconds) {
  const pad = (value) => String(Math.floor(value)).padStart(2, "0");
  if (seconds >= 3600) return `${Math.floor(seconds / 3600)}:${pad((seconds % 3600) / 60)} h`;
  return seconds < 60 ? `${number(seconds)} s` : `${Math.floor(seconds / 60)}:${pad(seconds % 60)}`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${number(seconds, 2)} s`;
  if (seconds < 600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

// A scale maps a range of values onto a range of pixels.
function scale(low, high, start, end) {
  const span = high - low || 1;
  const map = (value) => start + ((value - low) / span) * (end - start);
  map.back = (pixel) => low + ((pixel - start) / (end - start || 1)) * span;
  return map;
}

// Round values (1, 2 or 5 times a power of ten) that cut a range into about `count` parts.
function ticks(low, high, count, whole = false) {
  const rough = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = power * ([1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999) || 10);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

const extent = (values) =>
  values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

// One floating box for the whole page; charts put rows of (swatch class, name, value) into it.
const tip = html("div", { class: "tip", hidden: "" });

function showTip(event, title, rows) {
  tip.replaceChildren(html("div", { class: "tip-title" }, title));
  for (const [swatch, name, value] of rows) {
    tip.append(
      html(
        "div",
        { class: "tip-row" },
        html("span", { class: `swatch ${swatch}` }),
        html("span", { class: "tip-name" }, name),
        html("span", { class: "tip-value" }, value),
      ),
    );
  }
  tip.hidden = false;
  const room = document.documentElement.clientWidth;
  const left = event.clientX + 14 + tip.offsetWidth > room ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14;
  tip.style.left = `${Math.max(4, left) + window.scrollX}px`;
  tip.style.top = `${event.clientY + window.scrollY - tip.offsetHeight - 10}px`;
}

const hideTip = () => {
  tip.hidden = true;
};

// A card holds one figure; `draw(body)` is called again whenever its width or the choice of runs changes.
const figures = [];

function card(title, explanation, draw, attributes = {}) {
  const body = html("div", { class: "figure" });
  const node = html(
    "figure",
    { ...attributes, class: `card ${attributes.class || ""}` },
    html("figcaption", {}, html("h3", {}, title), html("p", {}, explanation)),
    body,
  );
  figures.push(() => {
    body.replaceChildren();
    draw(body, Math.max(220, body.clientWidth));
  });
  return node;
}

const redraw = () => figures.forEach((draw) => draw());

function key(entries) {
  const rows = entries.map(([swatch, name]) =>
    html("span", { class: "key-entry" }, html("span", { class: `swatch ${swatch}` }), name),
  );
  return html("div", { class: "key" }, ...rows);
}
