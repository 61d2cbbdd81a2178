// Runs side by side: figures, the settings that differ, prompts that both answered, curves over each other.

function compareView(ids) {
  const settings = html("div", {});
  const prompts = html("div", {});
  const records = () => Promise.all(ids.map((id) => read(`/api/run/${id}/overview`))).then((all) => all.every(Boolean) && all);
  const inner = overviewView(null, records);
  read(`/api/compare?runs=${ids.join(",")}`).then((found) => {
    if (!found) return;
    const names = ids.map((id) => state.lines.get(id)?.name ?? id);
    settings.replaceChildren(section("Settings that differ", null, settingTable(names, found.settings)));
    prompts.replaceChildren(...found.comparisons.map((one) => comparisonCard(names, one)));
  });
  const title = html("header", { class: "run-head" }, html("div", { class: "run-title" }, html("h1", {}, `${ids.length} runs compared`)));
  inner.node.firstChild.after(settings);
  return { node: html("div", {}, title, inner.node, prompts), update: inner.update };
}

function settingTable(names, rows) {
  if (!rows.length) return html("p", { class: "quiet-text" }, "None: the runs have the same settings.");
  const head = html("tr", {}, html("th", {}, ""), ...names.map((name, i) => html("th", { scope: "col" }, html("span", { class: `run-name run-${i % MOST_COMPARED}` }, html("span", { class: `swatch run-${i % MOST_COMPARED}` }), name))));
  const body = rows.map((row) => html("tr", { "data-setting": row.key }, html("th", { scope: "row", class: "mono" }, row.key), ...row.values.map((value) => html("td", { class: value ? "mono" : "unset" }, value || "not set"))));
  return html("div", { class: "scroll flush" }, html("table", { class: "runs differ" }, html("thead", {}, head), html("tbody", {}, ...body)));
}

function comparisonCard(names, one) {
  const b = names[one.run];
  const verdict = one.verdict.replace(/^A\b/, names[0]).replace(/^B\b/, b);
  const ties = one.pairs - one.first_wins - one.second_wins;
  const share = (count) => `${(100 * count) / one.pairs}%`;
  const parts = [["second", one.second_wins], ["tie", ties], ["first", one.first_wins]].map(([kind, count]) => {
    const part = html("span", { class: kind, title: `${count} prompts` });
    part.style.width = share(count);
    return part;
  });
  const sign = (value) => (value > 0 ? "+" : "") + number(value).replace("-", "−");
  const examples = one.examples.map(([first, second]) =>
    html(
      "article",
      { class: "group walk" },
      html("header", {}, html("pre", { class: "prompt" }, first.prompt)),
      html("div", { class: "sides" }, answerSide(names[0], "run-0", first), answerSide(b, `run-${one.run % MOST_COMPARED}`, second)),
    ),
  );
  return section(
    `${names[0]} against ${b}: ${one.task}`,
    null,
    html("p", { class: "verdict" }, verdict, html("span", { class: "soft" }, ` · ${one.measure} ${number(one.first)} and ${number(one.second)}, difference ${sign(one.difference)} (95 % interval ${sign(one.low)} to ${sign(one.high)})`)),
    html("div", { class: `wins run-${one.run % MOST_COMPARED}` }, ...parts),
    html("p", { class: "quiet-text" }, `${one.pairs} prompts that both answered: ${b} wins ${one.second_wins}, ${names[0]} wins ${one.first_wins}, ${ties} equal`),
    html("div", { class: "pairs" }, ...examples),
  );
}
