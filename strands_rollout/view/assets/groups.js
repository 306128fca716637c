// Groups side by side, with the advantage of each sample; for several runs, the samples of each question.

// each file of a dump numbers its groups from 0
function groupKey(row) { return `${row.run}:${row.file}:${row.group}`; }

// Draw the groups (for several runs, the questions) of all samples that match the filters.
function drawGroups() {
  const isCompared = state.runs.length > 0;
  const rows = state.shown.map((position) => state.rows[position]).filter((row) => (isCompared ? row.question : row.group !== null));
  const groups = groupBy(rows, isCompared ? (row) => row.question : groupKey);
  const back = button("", "‹ samples", closeSample);
  back.id = "back";
  const pane = byId("sample");
  const entries = isCompared ? byDifference(groups) : [...groups];
  const title = isCompared ? pluralize(entries.length, "question") + " in common" : pluralize(groups.size, "group");
  pane.replaceChildren(make("div", "head", "", back, make("h2", "", title), ...(isCompared ? [make("span", "dim", "largest difference of rewards first")] : [])));
  if (state.shown.length < state.rows.length) pane.firstChild.append(make("span", "dim", `of ${state.shown.length} of ${pluralize(state.rows.length, "sample")}, as filtered`), button("", "all samples", clearFilters));
  if (!entries.length) pane.append(make("p", "empty", isCompared ? "no question is common to several runs" : "no sample has a group"));
  const more = (from) => {
    for (const [, rows] of entries.slice(from, from + 20)) pane.append(isCompared ? questionBlock(rows) : groupBlock(rows));
    if (from + 20 < entries.length) {
      const next = button("", `${entries.length - from - 20} more`, () => { next.remove(); more(from + 20); });
      pane.append(next);
    }
  };
  more(0);
}

function meanReward(rows, run) { return mean(knownValues(rows.filter((row) => row.run === run), (row) => row.reward)); }

// Return [question, samples, difference of the runs' mean rewards], the largest difference first.
function byDifference(groups) {
  const inSeveralRuns = [...groups].filter(([, rows]) => new Set(rows.map((row) => row.run)).size > 1);
  const rewardSpread = (rows) => {
    const means = state.runs.map((_, run) => meanReward(rows, run)).filter((value) => value !== null);
    return Math.max(...means) - Math.min(...means);
  };
  return inSeveralRuns.map(([key, rows]) => [key, rows, rewardSpread(rows)]).sort((a, b) => b[2] - a[2]);
}

// One question, with a column for each run.
function questionBlock(rows) {
  const block = make("div", "wide", "", make("h3", "", rows[0].asked || rows[0].question));
  const beside = make("div", "beside");
  state.runs.forEach((name, run) => {
    const own = rows.filter((row) => row.run === run);
    const column = make("div", "", "", make("div", "time-words dim", "", legendItem(`run${run}`, name), make("span", "", `${pluralize(own.length, "sample")} · mean reward ${number(meanReward(rows, run))}`)));
    column.append(...own.slice(0, 4).map(groupCard));
    if (own.length > 4) {
      const more = button("", `${own.length - 4} more`, () => more.replaceWith(...own.slice(4).map(groupCard)));
      column.append(more);
    }
    beside.append(column);
  });
  block.append(beside);
  return block;
}

function groupBlock(rows) {
  const block = make("div", "wide", "", make("h3", "", `group ${rows[0].group} · ${rows[0].step === null ? "" : `step ${rows[0].step} · `}${pluralize(rows.length, "sample")} · mean reward ${number(meanReward(rows, rows[0].run))} · ${rows[0].asked}`));
  block.append(make("div", "columns", "", ...rows.map(groupCard)));
  return block;
}

function groupCard(row) {
  const element = makeCard(toneOf(row) === "wrong" ? "bad" : row.status === "completed" ? "turn" : "dropped", []);
  element.firstChild.append(make("span", "", nameOf(row)), ...verdictParts(row), endBadge(row));
  if (row.problems.length) element.firstChild.append(make("span", "badge " + problemTone(row.problems[0]), row.problems[0]));
  if (row.advantage !== null) {
    const bar = make("span", row.advantage < 0 ? "minus" : "");
    const share = Math.min(50, Math.abs(row.advantage) * 20);
    bar.style.width = share + "%";
    bar.style.left = (row.advantage < 0 ? 50 - share : 50) + "%";
    element.append(make("div", "dim", "advantage " + signed(row.advantage)), make("div", "signed", "", bar));
  }
  if (row.answer !== null || !row.label) element.append(make("div", "", finalAnswer(row) || "(no final text)")); // otherwise `verdictParts` shows it
  if (state.runs.length && row.step !== null) element.firstChild.append(make("span", "dim", `step ${row.step}`));
  if (row.part) element.firstChild.append(make("span", "dim", row.part));
  element.tabIndex = 0;
  element.setAttribute("role", "link");
  element.setAttribute("aria-label", `sample #${row.index}, reward ${number(row.reward)}` + (row.advantage === null ? "" : `, advantage ${signed(row.advantage)}`));
  element.addEventListener("click", () => void openSample(row.position));
  element.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.stopPropagation(); void openSample(row.position); } });
  return element;
}
