// Samples grouped by prompt with the answers ranked; first against last answers.

function answerCard(sample, rank, count) {
  const node = sampleCard(sample);
  node.prepend(html("span", { class: "rank" }, String(rank)));
  if (count > 1) node.querySelector(".facts").prepend(html("b", { class: "equal" }, `${count} equal answers`));
  return node;
}

// Equal answers are shown once, with their number.
function promptCard(group) {
  const answers = group.answers.map((answer) => ({ ...answer, run: { index: 0 } }));
  if (!answers.length) return null;
  const node = groupCard(answers, false);
  const equal = new Map();
  answers.forEach((answer, i) => {
    const content = JSON.stringify([answer.response, answer.reward, answer.turns, answer.error]);
    if (!equal.has(content)) equal.set(content, { answer, rank: i + 1, count: 0 });
    equal.get(content).count += 1;
  });
  node.querySelectorAll(":scope > .sample").forEach((one) => one.remove());
  node.append(...[...equal.values()].map((one) => answerCard(one.answer, one.rank, one.count)));
  node.classList.add("walk");
  return node;
}

function field(label, input) {
  return html("label", {}, html("span", {}, label), input);
}

function select(name, values, chosen) {
  const input = html("select", { name }, ...values.map(([value, text]) => html("option", { value }, text)));
  if (chosen !== undefined) input.value = chosen;
  return input;
}

// What to look for stays when the view is opened again.
const asked = { step: "", state: "trained", order: "newest", words: "", task: "" };

function samplesView(run) {
  const list = html("div", { class: "samples walked" });
  const note = html("p", { class: "quiet-text" });
  const more = html("button", { type: "button", hidden: "" }, "Show more");
  const step = html("input", { type: "number", name: "step", min: 1, placeholder: "any", value: asked.step });
  const words = html("input", { type: "search", name: "words", placeholder: "words of an answer", value: asked.words });
  const task = select("task", [["", "any"]], "");
  const taskField = field("Task", task);
  taskField.hidden = true;
  const order = select("order", [["newest", "newest"], ["oldest", "oldest"], ["best", "best reward"], ["worst", "worst reward"]], asked.order);
  const fate = select("state", [["trained", "trained"], ["buffered", "waiting"], ["taken", "being trained"], ["dropped", "dropped"]], asked.state);
  const form = html("form", { class: "filters" }, field("Step", step), field("Order", order), field("Outcome", fate), taskField, field("Text", words));
  form.addEventListener("submit", (event) => event.preventDefault());
  const readNewest = newest();
  let shown = 0;

  async function load(again) {
    Object.assign(asked, { step: step.value, state: fate.value, order: order.value, words: words.value, task: task.value });
    const offset = again ? shown : 0;
    const found = await readNewest(`/api/run/${run}/samples?${new URLSearchParams({ ...asked, offset })}`);
    if (!found) return;
    const cards = found.groups.map(promptCard).filter(Boolean);
    if (again) list.append(...cards);
    else list.replaceChildren(...cards);
    shown = offset + found.groups.length;
    more.hidden = !found.more;
    step.max = found.last_step || 1;
    if (found.tasks.length > 1 && task.options.length === 1) {
      task.append(...found.tasks.map((name) => html("option", { value: name }, name)));
      taskField.hidden = false;
    }
    const damage = found.damaged.length ? `; ${found.damaged.length} groups cannot be read: ${found.damaged[0]}` : "";
    note.textContent = shown ? `${shown} prompts, each with its answers ranked by reward${damage}` : `No group matches${damage}.`;
  }
  let waiting = 0;
  form.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => load(false), 200);
  });
  more.addEventListener("click", () => load(true));
  load(false);
  return { node: html("div", {}, form, note, list, more), update: () => {} };
}

const pairsAsked = { source: "", order: "better" };

function pairsView(run) {
  const list = html("div", { class: "pairs walked" });
  const note = html("p", { class: "quiet-text" });
  const more = html("button", { type: "button", hidden: "" }, "Show more");
  const tabs = html("div", { class: "choice" });
  const source = select("source", [], "");
  const form = html("form", { class: "filters" }, field("Prompts of", source), tabs);
  form.addEventListener("submit", (event) => event.preventDefault());
  const readNewest = newest();
  let shown = 0;

  async function load(again) {
    const offset = again ? shown : 0;
    const found = await readNewest(`/api/run/${run}/pairs?${new URLSearchParams({ ...pairsAsked, offset })}`);
    if (!found) return;
    pairsAsked.source = found.source;
    source.replaceChildren(...found.sources.map((name) => html("option", { value: name }, name)));
    source.value = found.source;
    const counts = { better: found.better, worse: found.worse, all: found.all };
    tabs.replaceChildren(
      ...Object.entries(counts).map(([name, count]) => {
        const button = html("button", { type: "button", "aria-pressed": String(pairsAsked.order === name) }, `${name} ${count}`);
        button.addEventListener("click", () => {
          pairsAsked.order = name;
          load(false);
        });
        return button;
      }),
    );
    const cards = found.pairs.map(pairCard);
    if (again) list.append(...cards);
    else list.replaceChildren(...cards);
    shown = offset + found.pairs.length;
    more.hidden = !found.more;
    note.textContent = found.all
      ? `${found.all} prompts were answered twice: ${found.better} got better, ${found.worse} got worse.`
      : "No prompt was answered twice: an evaluation at two steps, or a second epoch, gives pairs.";
  }
  source.addEventListener("input", () => {
    pairsAsked.source = source.value;
    load(false);
  });
  more.addEventListener("click", () => load(true));
  load(false);
  return { node: html("div", {}, form, note, list, more), update: () => {} };
}

function pairCard(pair) {
  const side = (title, one) =>
    html(
      "div",
      { class: "side" },
      html("p", { class: "facts" }, title, " ", html("span", { class: `score ${one.score > 0 ? "good" : "poor"}` }, number(one.score))),
      html("pre", { class: "response" }, one.response || "(empty)"),
    );
  return html(
    "article",
    { class: "group walk", "data-gap": pair.last.score - pair.first.score },
    html("header", {}, html("pre", { class: "prompt" }, pair.first.prompt)),
    html("div", { class: "sides" }, side(`step ${pair.steps[0]}`, pair.first), side(`step ${pair.steps[1]}`, pair.last)),
  );
}

// n and p walk through the cards of a view.
function walk(by) {
  const cards = [...document.querySelectorAll(".walk")];
  if (!cards.length) return;
  const at = cards.findIndex((one) => one.classList.contains("here"));
  const next = cards[Math.max(0, Math.min(cards.length - 1, at + by))];
  cards.forEach((one) => one.classList.toggle("here", one === next));
  next.scrollIntoView({ block: "nearest" });
}
