// The report: header, then the sections, once.

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs.map((run, index) => ({ ...run, index: index % 8, shown: true }));
const shownRuns = () => runs.filter((run) => run.shown);
const several = runs.length > 1;
const LONG_RUN = 150; // runs of more steps show smoothed curves, with the raw curve faint behind
const view = { smoothing: Math.max(...runs.map((run) => run.steps.length)) > LONG_RUN ? 0.9 : 0 };

function pageHeader() {
  const theme = html("button", { type: "button", class: "theme", title: "Switch between light and dark" }, "Theme");
  theme.addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme
      ? document.documentElement.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  });
  const run = runs[0];
  const settings = several ? [] : Object.entries(run.settings);
  return html(
    "header",
    { class: "page-head" },
    html("div", { class: "brand" }, html("span", {}, "Penstock report"), html("span", { class: "written" }, data.written), theme),
    html("h1", {}, several ? `${runs.length} runs compared` : run.name),
    html("dl", { class: "settings" }, ...settings.map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value)))),
    ...notices(),
  );
}

function build() {
  const page = document.getElementById("page");
  page.replaceChildren(
    pageHeader(),
    ...[
      findingsSection(),
      keyFigures(),
      configFolds(),
      learningSection(),
      pipelineSection(),
      dataSection(),
      section("Samples", null, sampleBrowser(runs)),
    ].filter(Boolean),
  );
  document.body.append(tip);
  redraw();
  let waiting = 0;
  window.addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(redraw);
  });
}

// The tests read these two attributes.
window.addEventListener("error", (event) => {
  document.documentElement.dataset.error = event.message;
});
build();
document.documentElement.dataset.ready = "yes";
