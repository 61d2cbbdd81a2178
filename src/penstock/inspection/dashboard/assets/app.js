// The page: which view is open, where its data comes from, and the keys.

const state = { lines: new Map(), complete: false, filter: "", cursor: null, open: null, tab: "overview", chosen: [] };
let current = null; // the open view: { node, update }

// A view's data: of the report, or of the server. Nothing if there is a problem, which the page then shows.
async function read(path) {
  if (saved) return readSaved(path);
  try {
    const reply = await fetch(path, { credentials: "same-origin" });
    const found = await reply.json();
    if (reply.ok) return found;
    showProblem(found.error);
  } catch {
    setLive("lost");
  }
  return null;
}

function readSaved(path) {
  const [name, query] = path.split("?");
  const answer = saved.answers[name];
  if (answer.error) showProblem(answer.error);
  if (answer.error) return null;
  return name.endsWith("/samples") ? { ...answer, groups: chosenGroups(answer.groups, new URLSearchParams(query)) } : answer;
}

// Return a `read` for one view: only its newest question is answered, whichever answer comes last.
function newest() {
  let asked = 0;
  return async (path) => {
    const own = ++asked;
    const found = await read(path);
    return own === asked ? found : null;
  };
}

function showProblem(text) {
  byId("page").querySelector(".problem")?.remove();
  byId("page").prepend(html("aside", { class: "notice problem", role: "alert" }, text));
}

function setLive(kind) {
  const texts = { live: "live", lost: "connection lost, trying again", connecting: "connecting", saved: `report, ${saved?.written}` };
  byId("live").textContent = texts[kind];
  byId("live").className = `live ${kind}`;
}

// -- which view is open -------------------------------------------------------------------------

function route() {
  const [, kind, first, tab] = location.hash.split("/");
  hideTip();
  figures.length = 0;
  current = null;
  if (kind === "compare" && first) return showComparison(first.split(",").filter((id) => state.lines.has(id)));
  const line = kind === "run" ? state.lines.get(first) : null;
  state.open = line ? line.id : null;
  state.tab = TABS.some(([name]) => name === tab) ? tab : "overview";
  document.body.dataset.pane = line ? "run" : "list";
  if (line) state.cursor = line.id;
  drawList();
  if (!saved) document.title = line ? `${line.name} · Penstock` : "Penstock dashboard";
  if (!line) return showNothing();
  if (line.state === "refused") return byId("page").replaceChildren(html("p", { class: "absent" }, line.note));
  current = (line.service ? serviceView : VIEWS[state.tab])(line.id);
  byId("page").replaceChildren(runHead(line), current.node);
  byId("page").scrollTop = 0;
  document.querySelector(".tabs .on")?.scrollIntoView({ block: "nearest", inline: "center" });
  current.draw?.();
}

function showNothing() {
  const first = listed()[0];
  if (first && !phone()) {
    history.replaceState(null, "", `#/run/${first.id}`); // at once: a key that is pressed now is for this run
    return route();
  }
  const empty = state.complete && !state.lines.size;
  const text = empty ? "No run in this folder yet. Start one with: penstock train" : "Choose a run.";
  byId("page").replaceChildren(html("p", { class: "absent" }, text));
}

function showComparison(ids) {
  if (ids.length < 2) return location.replace("#/");
  state.chosen = ids;
  state.open = null;
  document.body.dataset.pane = "run";
  if (!saved) document.title = "Comparison · Penstock";
  drawList();
  current = compareView(ids);
  byId("page").replaceChildren(current.node);
}

const openComparison = () => {
  location.hash = `#/compare/${state.chosen.join(",")}`;
};
const phone = () => matchMedia("(max-width: 760px)").matches;

// -- what the server tells ----------------------------------------------------------------------

let drawing = 0;

function drawSoon() {
  cancelAnimationFrame(drawing);
  drawing = requestAnimationFrame(drawList);
}

// Take the list as it is now; draw again what has changed.
function take({ runs, complete }) {
  const before = state.lines;
  const waited = !current;
  setLive("live");
  state.lines = new Map(runs.map((line) => [line.id, line]));
  const text = (lines, id) => JSON.stringify(lines.get(id));
  const ids = [...new Set([...before.keys(), ...state.lines.keys()])];
  const changed = ids.filter((id) => text(before, id) !== text(state.lines, id));
  if (!changed.length && complete === state.complete) return;
  state.complete = complete;
  changed.filter((id) => before.has(id) && state.lines.has(id)).forEach(renew);
  drawSoon();
  if (waited && !document.querySelector("#page .group")) route();
  document.documentElement.dataset.ready = complete ? "yes" : "no";
}

function renew(id) {
  const head = document.querySelector(".run-head");
  if (id === state.open && head) head.replaceWith(runHead(state.lines.get(id)));
  const compared = location.hash.startsWith("#/compare/") && state.chosen.includes(id);
  if ((id === state.open || compared) && current) current.update();
}

async function look() {
  const found = await read("/api/runs");
  if (found) take(found);
  setTimeout(look, 1000);
}

// -- keys ---------------------------------------------------------------------------------------

const KEYS = {
  j: () => moveCursor(1),
  k: () => moveCursor(-1),
  ArrowDown: () => document.activeElement === byId("filter") && moveCursor(1),
  Enter: () => state.cursor && (location.hash = `#/run/${state.cursor}`),
  x: () => choose(state.cursor ?? state.open),
  c: () => state.chosen.length > 1 && openComparison(),
  n: () => walk(1),
  p: () => walk(-1),
  t: switchTheme,
  "/": () => byId("filter").focus(),
  "?": () => byId("help").showModal(),
  Escape: goBack,
};
TABS.forEach(([name], i) => {
  KEYS[i + 1] = () => state.open && (location.hash = `#/run/${state.open}/${name}`);
});

function onKey(event) {
  const typing = event.target.matches?.("input[type=search], input[type=number], select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  if (typing && !["Escape", "Enter", "ArrowDown"].includes(event.key)) return;
  if (event.key === "Enter" && event.target.closest?.("a, button, form.filters")) return;
  const act = KEYS[event.key];
  if (!act) return;
  if (event.key === "/" || event.key === "?") event.preventDefault();
  act();
}

function goBack() {
  if (document.activeElement?.matches("input, select")) document.activeElement.blur();
  else if (state.filter) setFilter("");
  else if (location.hash.startsWith("#/compare/")) history.back();
  else if (state.tab !== "overview" && state.open) location.hash = `#/run/${state.open}`;
  else if (phone()) location.hash = "#/";
}

function setFilter(text) {
  state.filter = text;
  byId("filter").value = text;
  state.cursor = listed()[0]?.id ?? null;
  drawList();
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  if (!saved) localStorage.setItem("theme", root.dataset.theme);
  current?.draw?.();
}

function start() {
  const theme = saved ? null : localStorage.getItem("theme"); // a file may have no storage
  if (theme) document.documentElement.dataset.theme = theme;
  document.body.append(tip);
  byId("filter").addEventListener("input", (event) => setFilter(event.target.value));
  byId("theme").addEventListener("click", switchTheme);
  byId("keys").addEventListener("click", () => byId("help").showModal());
  byId("help").addEventListener("click", () => byId("help").close());
  byId("back").addEventListener("click", () => (location.hash = "#/"));
  byId("compare").addEventListener("click", openComparison);
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", route);
  let waiting = 0;
  window.addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => {
      redraw();
      current?.draw?.();
    });
  });
  if (saved) showSaved();
  else {
    setLive("connecting");
    look();
  }
}

function showSaved() {
  setLive("saved");
  Object.assign(state, { lines: new Map(saved.lines.map((line) => [line.id, line])), complete: true });
  const ids = saved.lines.map((line) => line.id);
  document.body.classList.toggle("alone", ids.length === 1);
  if (ids.length > 1) state.chosen = ids;
  if (ids.length > 1 && !location.hash) location.replace(`#/compare/${ids.join(",")}`);
  else route();
  document.documentElement.dataset.ready = "yes";
}

window.addEventListener("error", (event) => {
  document.documentElement.dataset.error = event.message; // the tests read it
});
start();
