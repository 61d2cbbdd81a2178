// The sample browser: a filtered list of prompts and responses with their outcome.

const SAMPLES_AT_ONCE = 12;

function sampleBrowser(runs) {
  const samples = runs.flatMap((run) => run.samples.map((sample) => ({ ...sample, run })));
  if (!samples.length) return html("p", { class: "absent" }, "No samples in this run folder.");
  const list = html("div", { class: "samples" });
  const count = html("p", { class: "quiet-text", id: "sample-count" });
  const more = html("button", { type: "button", class: "more" }, "Show more");
  const fields = filterFields(runs, samples);
  let shown = SAMPLES_AT_ONCE;
  const update = () => {
    const found = samples.filter((sample) => fields.every((field) => field.keeps(sample)));
    list.replaceChildren(...found.slice(0, shown).map((sample) => sampleCard(sample, runs.length > 1)));
    count.textContent = `${found.length} of ${samples.length} samples, evenly taken from the run`;
    more.hidden = found.length <= shown;
  };
  const restart = () => {
    shown = SAMPLES_AT_ONCE;
    update();
  };
  for (const field of fields) field.input.addEventListener("input", restart);
  more.addEventListener("click", () => {
    shown += 2 * SAMPLES_AT_ONCE;
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
  const holds = (sample) => `${sample.prompt}\n${sample.response}`.toLowerCase().includes(text.value.toLowerCase());
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

function sampleCard(sample, withRun) {
  const good = sample.reward !== null && sample.reward > 0;
  const versions = sample.versions.map(([version, length]) => (length ? `v${version} ×${length}` : `v${version}`)).join(", ");
  const facts = [
    withRun ? sample.run.name : null,
    sample.fate,
    `${sample.num_tokens} tokens${sample.finish_reason === "length" ? ", cut at the limit" : ""}`,
    versions,
    sample.task,
  ];
  const parts = Object.entries(sample.parts).map(([name, value]) => html("span", { class: "part" }, `${name} ${number(value)}`));
  return html(
    "article",
    { class: `sample ${sample.state}`, "data-rollout": sample.rollout_id, "data-reward": sample.reward, "data-step": sample.step },
    html(
      "header",
      {},
      html("span", { class: `reward ${good ? "good" : "poor"}` }, sample.reward === null ? "no reward" : `${good ? "▲" : "▽"} ${number(sample.reward)}`),
      ...parts,
      html("span", { class: "facts" }, facts.filter(Boolean).join(" · ")),
    ),
    html("pre", { class: "prompt" }, sample.prompt),
    html("pre", { class: "response" }, sample.response),
    html("footer", {}, [sample.gt_answer === null || sample.gt_answer === undefined ? null : `expected ${sample.gt_answer}`, sample.note, sample.error].filter(Boolean).join(" · ")),
  );
}
