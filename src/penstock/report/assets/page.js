for (const run of JSON.parse(document.getElementById("data").textContent).runs) {
  const block = document.createElement("pre");
  block.textContent = run.name + "\n" + JSON.stringify(run.figures, null, 2) + "\n" + run.missing.join("\n");
  document.getElementById("page").append(block);
}
document.documentElement.dataset.ready = "yes";
