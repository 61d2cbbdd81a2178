// The sample browser: prompts with their responses, the best first, filtered by the reader.

const GROUPS_AT_ONCE = 6;

function sampleBrowser(runs) {
  const samples = runs.flatMap((run) => run.samples.map((sample) => ({ ...sample, run })));
  if (!samples.length) return html("p", { class: "absent" }, "No samples in this run folder.");
  const list = html("div", { class: "samples" });
  const count = html("p", { class: "quiet-text", id: "sample-count" });
  const more = html("button", { type: "button", class: "more" }, "Show more");
  const fields = filterFields(runs, samples);
  let shown = GROUPS_AT_ONCE;
  const update = () => {
    const found = samples.filter((sample) => fields.every((field) => field.keeps(sample)));
    const groups = grouped(found);
    list.replaceChildren(...groups.slice(0, shown).map((group) => groupCard(group, runs.length > 1)));
    count.textContent = `${found.length} of ${samples.length} samples in ${groups.length} groups, evenly taken from the run`;
    more.hidden = groups.length <= shown;
  };
  const restart = () => {
    shown = GROUPS_AT_ONCE;
    update();
  };
  for (const field of fields) field.input.addEventListener("input", restart);
  more.addEventListener("click", () => {
    shown += 2 * GROUPS_AT_ONCE;
    update();
  });
  update();
  const form = html("form", { class: "filters" }, ...fields.map((field) => html("label", {}, html("span", {}, field.label), field.input)));
  form.addEventListener("submit", (event) => event.preventDefault());
  return html("div", {}, form, count, list, more);
}

function filterFields(runs, samples) {
  const steps = [...new Set(samples.map((sample) => sample.step).filter((step) => step !== null))].sort((a, b) => a - b);
  const states = [...new Set(samples.map((sample) => sample.state))];
  const fields = [
    choice("Step", "step", ["any", ...steps], (sample, value) => String(sample.step) === value),
    bound("Reward from", "reward-from", (sample, value) => sample.reward !== null && sample.reward >= value),
    bound("to", "reward-to", (sample, value) => sample.reward !== null && sample.reward <= value),
  ];
  if (states.length > 1) fields.push(choice("Fate", "fate", ["any", ...states], (sample, value) => sample.state === value));
  if (runs.length > 1) {
    const names = runs.map((run) => run.name);
    fields.push(choice("Run", "run", ["any", ...names], (sample, value) => sample.run.name === value));
  }
  const text = html("input", { type: "search", name: "text", placeholder: "words" });
  const said = (turn) => [turn.text, ...turn.tools.flatMap((tool) => [tool.name, tool.arguments])];
  const holds = (sample) => [sample.prompt, sample.response, ...sample.turns.flatMap(said)].join("\n").toLowerCase().includes(text.value.toLowerCase());
  return [...fields, { label: "Text", input: text, keeps: (sample) => !text.value || holds(sample) }];
}

function choice(label, name, values, matches) {
  const input = html("select", { name }, ...values.map((value) => html("option", { value }, String(value))));
  return { label, input, keeps: (sample) => input.value === "any" || matches(sample, input.value) };
}

function bound(label, name, matches) {
  const input = html("input", { type: "number", name, step: "any", placeholder: "any" });
  return { label, input, keeps: (sample) => input.value === "" || matches(sample, Number(input.value)) };
}

// Samples of one prompt together, in the order of the run; the best response first.
function grouped(samples) {
  const groups = new Map();
  for (const sample of samples) {
    const name = `${sample.run.index} ${sample.group_id}`;
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(sample);
  }
  const worth = (sample) => (sample.reward === null ? -Infinity : sample.reward);
  return [...groups.values()].map((group) => group.sort((a, b) => worth(b) - worth(a) || 0));
}

function groupCard(group, withRun) {
  const first = group[0];
  const rewards = group.map((sample) => sample.reward).filter((reward) => reward !== null);
  const mean = rewards.length ? `${group.length} responses, mean reward ${number(rewards.reduce((a, b) => a + b, 0) / rewards.length)}` : null;
  const facts = [withRun ? first.run.name : null, first.fate, mean, first.task];
  const expected = first.gt_answer === null || first.gt_answer === undefined ? null : html("p", { class: "expected" }, `expected ${first.gt_answer}`);
  return html(
    "article",
    { class: `group ${first.state}`, "data-group": first.group_id },
    html("header", {}, html("pre", { class: "prompt" }, first.prompt), expected, html("p", { class: "facts" }, facts.filter(Boolean).join(" · "))),
    ...group.map(sampleCard),
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
