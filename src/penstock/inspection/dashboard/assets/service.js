// The page of a service: its models with their curves, the queue of each owner, the newest commands.

const MODEL_CHARTS = [
  { name: "loss:sum", title: "Loss", text: "Of each forward_backward: the sum over its tokens.", x: "command", wide: true },
  { name: "grad_norm", title: "Gradient norm", text: "Of each optim_step, before clipping.", x: "command", zero: true, wide: true },
];

// A model in the table of what is drawn: its figures, as those of a run.
function modelRows(model) {
  return [
    ["Owner", [model.owner]],
    ["Rank", [model.rank ? String(model.rank) : "all weights"]],
    ["Optimizer steps", [number(model.optimizer_steps)]],
    ["Done", [number(model.done)]],
    ["Failed", [number(model.failed)]],
    ["Waiting", [number(model.waiting)]],
    ["Last command", model.last ? [model.last.kind, html("span", { class: "unit" }, ` ${ago(model.last.at)}`)] : ["–"]],
  ];
}

function commandTable(commands) {
  const rows = commands.map((command) =>
    html(
      "tr",
      { "data-outcome": command.outcome },
      html("td", { class: "soft" }, moment(command.at)),
      html("td", {}, command.kind),
      html("td", {}, command.outcome),
      html("td", {}, command.owner),
      html("td", { class: "id", title: command.name }, command.name),
      html("td", { class: "wide" }, command.why),
    ),
  );
  return html("div", { class: "scroll" }, html("table", { class: "events" }, html("tbody", {}, ...rows)));
}

function queueCard(queue) {
  const more = queue.waiting - queue.first.length;
  const text = `${queue.owner}: ${queue.waiting} waiting${more ? `, the first ${queue.first.length}` : ""}`;
  return html("div", { class: "queue", "data-waiting": queue.waiting }, html("h3", {}, text), commandTable(queue.first));
}

function serviceView(id) {
  const [above, below] = [html("div", {}), html("div", {})];
  const get = async () => {
    const found = await read(`/api/run/${id}/overview`);
    if (!found || !below.isConnected) return null;
    const queues = found.queues.length ? found.queues.map(queueCard) : [html("p", { class: "quiet-text" }, "No command waits.")];
    const older = found.older_models ? [html("p", { class: "quiet-text" }, `${found.older_models} older models are not shown.`)] : [];
    above.replaceChildren(settingList(found.settings));
    below.replaceChildren(...older, section("Queues", null, ...queues), section("Newest commands", null, commandTable(found.commands)));
    const created = found.older_models + found.models.length; // a model keeps its colour when others come
    return found.models.map((model, i) => ({ ...model, index: created - 1 - i, again_in_s: found.again_in_s }));
  };
  const inner = overviewView(null, get, "model");
  return { ...inner, node: html("div", {}, above, inner.node, below) };
}
