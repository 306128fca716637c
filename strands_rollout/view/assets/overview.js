// The overview: numbers, charts that filter the list, and samples worth seeing.

const METRICS = [
  ["accuracy", (rows) => mean(knownValues(rows, (row) => row.right)), share],
  ["mean reward", (rows) => mean(knownValues(rows, (row) => row.reward)), compact],
  ["tokens of a response", (rows) => mean(knownValues(rows, (row) => row.length)), compact],
  ["turns", (rows) => mean(knownValues(rows, (row) => row.turns)), compact],
  ["tool calls", (rows) => mean(knownValues(rows, (row) => row.calls)), compact],
  ["tool calls with an error", errorShare, share],
  ["truncated", (rows) => statusShare(rows, "truncated"), share],
  ["groups with spread", (rows) => groupSpread(rows)[2], share],
  ["seconds of an episode", (rows) => mean(knownValues(rows, FIELDS.seconds)), compact],
];

function statusShare(rows, status) { return rows.length ? rows.filter((row) => row.status === status).length / rows.length : null; }

function toolSums(rows) {
  const sums = new Map();
  for (const row of rows) for (const [name, [calls, failed]] of Object.entries(row.tools)) {
    const before = sums.get(name) || [0, 0];
    sums.set(name, [before[0] + calls, before[1] + failed]);
  }
  return sums;
}

function errorShare(rows) {
  const [calls, failed] = [...toolSums(rows).values()].reduce((sum, one) => [sum[0] + one[0], sum[1] + one[1]], [0, 0]);
  if (calls) return failed / calls;
  const total = knownValues(rows, (row) => row.calls).reduce((sum, count) => sum + count, 0); // results of eval don't name tools
  return total ? knownValues(rows, (row) => row.errors).reduce((sum, count) => sum + count, 0) / total : null;
}

// Return [number of groups whose rewards differ, number of groups, share], for groups with several rewards. GRPO learns only from
// rewards that differ.
function groupSpread(rows) {
  const groups = groupBy(rows.filter((row) => row.group !== null && row.reward !== null), groupKey);
  const several = [...groups.values()].filter((own) => own.length > 1);
  const spread = several.filter((own) => own.some((row) => row.reward !== own[0].reward)).length;
  return [spread, several.length, several.length ? spread / several.length : null];
}

function showOverview() {
  state.pane = "overview";
  document.body.classList.add("opened");
  writeHash();
  timed("overview", drawOverview);
  byId("sample").scrollTop = 0;
}

function drawOverview() {
  const rows = state.shown.map((position) => state.rows[position]);
  const runs = state.runs.length ? state.runs : [""];
  const byRun = runs.map((_, run) => rows.filter((row) => row.run === run));
  const pane = byId("sample");
  pane.replaceChildren(overviewHead(rows), ...runLegend());
  if (!rows.length) {
    pane.append(make("p", "empty", state.rows.length ? "no sample matches the filters" : state.live ? "no samples yet; new samples appear here" : "this dump has no samples"));
    return;
  }
  const columns = make("div", "panels", "",
    ...[notablePanel(rows), ...setBars(byRun), rewardChart(byRun), histogram("response lengths, in tokens", byRun, "length"), stopBars(byRun), toolBars(byRun),
      problemBars(byRun), driftPanel(byRun), timeSplit(runs, byRun)].filter(Boolean));
  pane.append(tiles(byRun), ...[stepChart(runs)].filter(Boolean), columns);
}

function overviewHead(rows) {
  const back = button("", "‹ samples", closeSample);
  back.id = "back";
  const head = make("div", "head", "", back, make("h2", "", state.runs.length ? "Overview of the runs" : "Overview"));
  if (rows.length < state.rows.length) head.append(make("span", "dim", `${rows.length} of ${pluralize(state.rows.length, "sample")}, as filtered`), button("", "all samples", clearFilters));
  return head;
}

function runLegend() {
  if (!state.runs.length) return [];
  return [make("div", "time-words", "", ...state.runs.map((name, run) => legendItem(`run${run}`, name)), button("", "question by question", showGroups))];
}

function tiles(byRun) {
  const found = METRICS.map(([name, valueOf, shown]) => [name, byRun.map(valueOf), shown]).filter(([, values]) => values.some((value) => value !== null)).map(([name, values, shown]) => [name, values.map(shown)]);
  const spread = byRun.map((rows) => groupSpread(rows));
  const drifted = byRun.map((rows) => knownValues(rows, (row) => row.drift));
  const more = [["samples", byRun.map((rows) => rows.length)], ...found];
  if (drifted.some((values) => values.length)) more.push(["samples with drift", drifted.map((values) => share(mean(values.map((value) => Number(value > 0)))))]);
  if (byRun.flat().some((row) => row.problems.length)) more.push(["samples with problems", byRun.map((rows) => rows.filter((row) => row.problems.length).length)]);
  return make("div", "tiles", "", ...more.map(([name, values]) => {
    const tile = make("div", "tile", "", make("b", "", "", ...values.map((value, run) => make("span", values.length > 1 ? "of run" + run : "", value))), make("span", "dim", name));
    if (name === "groups with spread") tile.title = `${spread.map(([some, all]) => `${some} of ${all}`).join(" | ")}: groups whose rewards differ; GRPO learns only from these`;
    return tile;
  }));
}

// Draw the chosen metric over steps, a line per run and set; a click filters by step.
function stepChart(runs) {
  const rows = state.ofAnyStep.filter((row) => row.step !== null);
  if (new Set(rows.map((row) => row.step)).size < 2) return null;
  const metrics = METRICS.filter(([, valueOf]) => valueOf(rows) !== null);
  const [name, valueOf, shown] = metrics.find(([one]) => one === state.metric) || metrics[0];
  const series = [];
  for (const [run, runName] of runs.entries()) {
    const sets = [...groupBy(rows.filter((row) => row.run === run), (row) => row.set)];
    sets.forEach(([set, ofSet], place) => {
      const points = [...groupBy(ofSet, (row) => row.step)].map(([x, held]) => ({ x, y: valueOf(held), count: held.length })).filter(({ y }) => y !== null).sort((a, b) => a.x - b.x);
      if (points.length) series.push({ name: [runName, sets.length > 1 || !runName ? set : ""].filter(Boolean).join(" "), color: `run${runs.length > 1 ? run : place % 4}${runs.length > 1 && place ? " dashed" : ""}`, points });
    });
  }
  const choice = make("select");
  choice.setAttribute("aria-label", "metric");
  choice.append(...metrics.map(([one]) => { const o = make("option", "", one); o.value = one; return o; }));
  choice.value = name;
  choice.addEventListener("input", () => { state.metric = choice.value; drawOverview(); document.querySelector(".panel select").focus(); });
  const chart = lineChart(series, shown, byId("step").value, (x) => toggleChoice("step", String(x)));
  const legend = series.length > 1 ? make("div", "time-words", "", ...series.map((one) => legendItem(one.color, one.name))) : null;
  const chartPanel = panel("", ...chart, legend);
  chartPanel.firstChild.append(choice, " per step");
  return chartPanel;
}

function setBars(byRun) {
  const sets = [...new Set(byRun.flat().map((row) => row.set))];
  if (sets.length < 2) return [];
  const isGraded = byRun.flat().some((row) => row.right !== null);
  const [name, valueOf, shown] = METRICS[isGraded ? 0 : 1];
  const entries = sets.map((set) => {
    const values = byRun.map((rows) => valueOf(rows.filter((row) => row.set === set)));
    return { name: set, counts: values.map((value) => Math.max(0, value ?? 0)), words: values.map(shown), act: () => toggleChoice("set", set), marked: byId("set").value === set };
  });
  return [barChart(`${name} by set`, entries)];
}

function rewardChart(byRun) {
  const rows = byRun.flat().filter((row) => row.right === null);
  const wrongBelow = rows.length ? 0 : knownValues(byRun.flat().filter((row) => !(row.right > 0)), (row) => row.reward).reduce((a, b) => Math.max(a, b), -Infinity);
  return histogram("rewards", byRun, "reward", (bin) => (bin.from > wrongBelow ? "good" : bin.to <= wrongBelow || bin.from === bin.to ? "bad" : ""));
}

function countsBy(byRun, valuesOf) {
  const names = new Map();
  byRun.forEach((rows, run) => {
    for (const row of rows) for (const value of valuesOf(row)) {
      if (!names.has(value)) names.set(value, byRun.map(() => 0));
      names.get(value)[run] += 1;
    }
  });
  return [...names].sort((a, b) => Math.max(...b[1]) - Math.max(...a[1]));
}

function stopBars(byRun) {
  const entries = countsBy(byRun, (row) => [row.stop || row.status]).map(([name, counts]) => {
    const id = byRun.flat().some((row) => row.stop === name) ? "stop" : "status";
    const tone = name === "completed" ? "" : name.endsWith("error") || name === "failed" ? "bad" : "warn";
    return { name, counts, tone: byRun.length === 1 ? tone : "", act: () => toggleChoice(id, name), marked: byId(id).value === name };
  });
  return barChart("how episodes ended", entries);
}

// Return the action of a bar whose name is a value of `field`: filter the list by this value.
function filterByName(field, name) {
  const word = `${field}="${name}"`;
  return { act: () => toggleWords(field, [word]), marked: byId("query").value.includes(word) };
}

function toolBars(byRun) {
  const sums = byRun.map(toolSums);
  const names = [...new Set(sums.flatMap((one) => [...one.keys()]))];
  const of = (name) => sums.map((one) => one.get(name) || [0, 0]);
  const entries = names.map((name) => ({ name, counts: of(name).map(([calls]) => calls), words: of(name).map(([calls, failed], run) => (sums[run].size ? `${calls}, ${failed} failed` : "not recorded")), ...filterByName("tool", name) }));
  const anyFailed = names.some((name) => of(name).some(([, failed]) => failed));
  return barChart("tool calls", entries.sort((a, b) => Math.max(...b.counts) - Math.max(...a.counts)), anyFailed && make("p", "note dim", "failed: an error, a timeout, no such tool, or code that exits with an error"), anyFailed && button("", "samples with a failed call", () => toggleWords("errors", ["errors>0"])));
}

function problemBars(byRun) {
  const entries = countsBy(byRun, (row) => row.problems).map(([name, counts]) => ({ name, counts, tone: byRun.length === 1 ? (problemTone(name) === "older" ? "aged" : "bad") : "", ...filterByName("problem", name) }));
  return barChart("problems, in samples", entries);
}

function driftPanel(byRun) {
  const drifted = byRun.map((rows) => knownValues(rows, (row) => row.drift));
  if (!byRun.flat().some((row) => row.trained + row.dropped)) return null; // without tokens, as in results of eval
  if (!drifted.some((values) => values.length)) return panel("drift", make("p", "note dim", "Not measured: open the dump with --tokenizer to see which tokens change when the text is re-encoded."));
  const words = drifted.map((values, run) => {
    const tokens = values.reduce((sum, value) => sum + value, 0);
    const sampled = knownValues(byRun[run], (row) => row.trained).reduce((sum, value) => sum + value, 0);
    return `${tokens} tokens, in ${values.filter(Boolean).length} of ${pluralize(values.length, "sample")}; ${sampled} tokens are trained`;
  });
  const some = drifted.flat().some(Boolean);
  return panel("drift", make("p", some ? "" : "note dim", words.join(" | ")), some ? button("", "samples with drift", () => toggleWords("drift", ["drift>0"])) : null);
}

function timeSplit(runs, byRun) {
  if (!byRun.flat().some(isSplit)) return null;
  const kinds = ["generate", "tool", "wait"];
  const lines = byRun.map((rows, run) => {
    const split = rows.filter(isSplit);
    if (!split.length) return make("p", "note dim", `${runs[run]}: not recorded`);
    const sums = kinds.map((kind) => mean(split.map((row) => row.times[kind])) || 0);
    const all = sums.reduce((sum, s) => sum + s, 0) || 1;
    const bar = make("div", "time");
    const words = make("div", "time-words dim", runs[run] ? runs[run] + ":" : "");
    kinds.forEach((kind, place) => {
      const part = make("span", kind);
      part.style.flex = `${(1000 * sums[place]) / all} 1 0`;
      bar.append(part);
      words.append(legendItem(kind, `${kind} ${seconds(sums[place])} (${share(sums[place] / all)})`));
    });
    return make("div", "", "", bar, words);
  });
  return panel("mean time of an episode", ...lines, button("", "slowest first", () => { byId("sort").value = "-seconds"; filtersChanged(); }));
}

// Return up to 6 [reason, row] pairs, at most one per reason; the most informative reasons come first.
function notableSamples(rows) {
  const mixed = new Set();
  for (const [key, own] of groupBy(rows.filter((row) => row.group !== null), groupKey)) {
    const tones = own.map(toneOf);
    if (tones.includes("right") && tones.includes("wrong")) mixed.add(key);
  }
  const isWrong = (row) => toneOf(row) === "wrong";
  const reasons = [
    ["has a problem", (row) => row.problems.some((kind) => problemTone(kind) === "problem"), (row) => row.problems.length],
    ["wrong, but others of its group are right", (row) => isWrong(row) && mixed.has(groupKey(row)), (row) => row.calls || 0],
    ["failed tool calls", (row) => failedCalls(row) > 0, failedCalls],
    ["wrong, and not cut off", (row) => isWrong(row) && row.status === "completed", (row) => row.length],
    ["right, with most calls", (row) => toneOf(row) === "right", (row) => row.calls || 0],
    ["truncated", (row) => row.status === "truncated", (row) => row.length],
    ["failed", (row) => row.status === "failed", () => 0],
    ["most drift", (row) => row.drift > 0, (row) => row.drift],
    ["longest", () => true, (row) => row.length || 0],
    ["slowest", (row) => row.times, (row) => row.times.all],
  ];
  const found = new Map();
  for (const [reason, holds, key] of reasons) {
    const best = rows.filter((row) => holds(row) && !found.has(row)).reduce((one, row) => (one === null || key(row) > key(one) ? row : one), null);
    if (best && found.size < 6) found.set(best, reason);
  }
  return [...found].map(([row, reason]) => [reason, row]);
}

function notablePanel(rows) {
  const list = notableSamples(rows).map(([reason, row]) => {
    const entry = button("worth", "", () => void openSample(row.position, { view: "talk" }));
    entry.append(make("span", "", reason), make("span", "small", "", ...runBadge(row), make("span", "dim", nameOf(row)), ...verdictParts(row)));
    return entry;
  });
  return panel("notable samples", ...list);
}
