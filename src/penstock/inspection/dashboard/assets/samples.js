// Samples grouped by prompt with the answers ranked; first against last answers.

function groupCard(group) {
  const first = group[0];
  const rewards = group.map((sample) => sample.reward).filter((reward) => reward !== null);
  const mean = rewards.length ? `${group.length} responses, mean reward ${number(rewards.reduce((a, b) => a + b, 0) / rewards.length)}` : null;
  const facts = [first.fate, mean, first.task];
  const expected = first.gt_answer === null || first.gt_answer === undefined ? null : html("p", { class: "expected" }, `expected ${first.gt_answer}`);
  return html(
    "article",
    { class: `group ${first.state}`, "data-group": first.group_id },
    html("header", {}, html("pre", { class: "prompt" }, first.prompt), expected, html("p", { class: "facts" }, facts.filter(Boolean).join(" · "))),
  );
}

function sampleCard(sample) {
  const good = sample.reward !== null && sample.reward > 0;
  const versions = sample.versions.map(([version, length]) => (length ? `v${version} ×${length}` : `v${version}`)).join(", ");
  const facts = [`${sample.num_tokens} tokens${sample.finish_reason === "length" ? ", cut at the limit" : ""}`, versions, sample.note, sample.error];
  const parts = Object.entries(sample.parts).map(([name, value]) => html("span", { class: "part" }, `${name} ${number(value)}`));
  return html(
    "div",
    { class: "sample", "data-rollout": sample.rollout_id, "data-reward": sample.reward, "data-step": sample.step },
    html("span", { class: `reward ${good ? "good" : "poor"}` }, sample.reward === null ? "no reward" : `${good ? "▲" : "▽"} ${number(sample.reward)}`),
    html("div", {}, sample.turns.length ? turnList(sample.turns) : html("pre", { class: "response" }, sample.response), html("p", { class: "facts" }, ...parts, facts.filter(Boolean).join(" · "))),
  );
}

// An agent's messages in turn, with their tool calls; a line says where a call starts a branch or a reward was earned.
function turnList(turns) {
  const list = html("ol", { class: "turns" });
  const line = (name, text) => list.append(html("li", { class: name }, text));
  let last = null;
  let earned = 0;
  for (const turn of turns) {
    if (turn.call !== last && turn.call && turn.parent !== turn.call - 1) {
      line("branch", `call ${turn.call}: ${turn.parent === null ? "a new conversation" : `continues call ${turn.parent}`}`);
    }
    if (turn.earned !== earned) line("earned", `reward ${number(turn.earned)} so far`);
    const kind = ["assistant", "user", "tool", "system"].includes(turn.role) ? turn.role : "other";
    const tools = turn.tools.map((tool) => html("pre", { class: "tool-call" }, `${tool.name}(${tool.arguments})`));
    const said = turn.text || !tools.length ? [html("pre", { class: "said" }, turn.text)] : [];
    list.append(html("li", { class: `turn ${kind}`, "data-call": turn.call }, html("span", { class: "role" }, turn.role), ...said, ...tools));
    [last, earned] = [turn.call, turn.earned];
  }
  return list;
}

function answerCard(sample, rank, count) {
  const node = sampleCard(sample);
  node.prepend(html("span", { class: "rank" }, String(rank)));
  if (count > 1) node.querySelector(".facts").prepend(html("b", { class: "equal" }, `${count} equal answers`));
  return node;
}

// Equal answers are shown once, with their number.
function promptCard(group) {
  const answers = group.answers;
  if (!answers.length) return null;
  const node = groupCard(answers);
  const equal = new Map();
  answers.forEach((answer, i) => {
    const content = JSON.stringify([answer.response, answer.reward, answer.turns, answer.error]);
    if (!equal.has(content)) equal.set(content, { answer, rank: i + 1, count: 0 });
    equal.get(content).count += 1;
  });
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

// A report holds groups of the whole run: these are the ones that a query asks for, in its order.
function chosenGroups(groups, query) {
  const words = query.get("words").toLowerCase();
  const said = (answer) => [answer.response, ...answer.turns.map((turn) => turn.text)].join("\n").toLowerCase();
  const keeps = ({ answers }) =>
    answers.length > 0 &&
    answers[0].state === query.get("state") &&
    (!query.get("step") || answers[0].step === Number(query.get("step"))) &&
    (!query.get("task") || answers[0].task === query.get("task")) &&
    answers.some((answer) => said(answer).includes(words));
  const mean = ({ answers }) => answers.reduce((sum, answer) => sum + (answer.reward || 0), 0) / answers.length;
  const step = ({ answers }) => answers[0].step || 0;
  const ranks = { newest: (a, b) => step(b) - step(a), oldest: (a, b) => step(a) - step(b), best: (a, b) => mean(b) - mean(a), worst: (a, b) => mean(a) - mean(b) };
  return groups.filter(keeps).sort(ranks[query.get("order")]);
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

const PAIRS_AT_ONCE = 12;
const gap = ([first, last]) => last.score - first.score;
const ORDERS = { better: (pair) => gap(pair) > 0, worse: (pair) => gap(pair) < 0, all: () => true };
const pairsAsked = { source: "", order: "better" };

function pairsView(run) {
  const list = html("div", { class: "pairs walked" });
  const note = html("p", { class: "quiet-text" }, "Reading …");
  const more = html("button", { type: "button", hidden: "" }, "Show more");
  const tabs = html("div", { class: "choice" });
  const source = select("source", [], "");
  const form = html("form", { class: "filters" }, field("Prompts of", source), tabs);
  form.addEventListener("submit", (event) => event.preventDefault());
  let found = [];
  let shown = PAIRS_AT_ONCE;

  function draw() {
    const compared = found.find((one) => one.task === pairsAsked.source) || found[0];
    if (!compared) {
      note.textContent = "No prompt was answered twice: an evaluation at two steps, or a second epoch, gives pairs.";
      return;
    }
    source.value = compared.task;
    const counts = { better: compared.second_wins, worse: compared.first_wins, all: compared.pairs };
    tabs.replaceChildren(
      ...Object.entries(counts).map(([name, count]) => {
        const press = () => pick({ order: name });
        return html("button", { type: "button", "aria-pressed": String(pairsAsked.order === name), onclick: press }, `${name} ${count}`);
      }),
    );
    const pairs = compared.examples.filter(ORDERS[pairsAsked.order]);
    list.replaceChildren(...pairs.slice(0, shown).map(pairCard));
    more.hidden = pairs.length <= shown;
    note.textContent = `${compared.pairs} prompts were answered twice: ${counts.better} got better, ${counts.worse} got worse${compared.examples.length < compared.pairs ? "; the largest changes are shown" : ""}.`;
  }
  const pick = (wanted) => {
    Object.assign(pairsAsked, wanted);
    shown = PAIRS_AT_ONCE;
    draw();
  };
  source.addEventListener("input", () => pick({ source: source.value }));
  more.addEventListener("click", () => {
    shown += PAIRS_AT_ONCE;
    draw();
  });
  read(`/api/run/${run}/pairs`).then((answer) => {
    if (!answer) return;
    found = answer.comparisons;
    source.replaceChildren(...found.map((one) => html("option", { value: one.task }, one.task)));
    draw();
  });
  return { node: html("div", {}, form, note, list, more), update: () => {} };
}

function pairCard([first, last]) {
  const sides = [first, last].map((answer) => answerSide(`step ${answer.step}`, "", answer));
  return html("article", { class: "group walk", "data-gap": gap([first, last]) }, html("header", {}, html("pre", { class: "prompt" }, first.prompt)), html("div", { class: "sides" }, ...sides));
}

// One of two answers to a prompt, under its title.
function answerSide(title, runClass, answer) {
  return html(
    "div",
    { class: `side ${runClass}` },
    html("p", { class: "facts" }, runClass ? html("span", { class: `swatch ${runClass}` }) : null, ` ${title} `, html("span", { class: `score ${answer.score > 0 ? "good" : "poor"}` }, number(answer.score))),
    html("pre", { class: "response" }, answer.response || "(empty)"),
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
