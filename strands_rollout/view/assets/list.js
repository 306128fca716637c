// The list: filters, sorting, and as many rows as can be seen.

const ROW_HEIGHT = 56;
const FIELDS = {
  reward: (row) => row.reward, advantage: (row) => row.advantage, turns: (row) => row.turns, calls: (row) => row.calls,
  errors: (row) => row.errors, length: (row) => row.length, trained: (row) => row.trained, dropped: (row) => row.dropped,
  drift: (row) => row.drift, problems: (row) => row.problems.length, seconds: (row) => row.times && row.times.all,
  versions: (row) => row.versions.length, index: (row) => row.index, group: (row) => row.group,
};
const COMPARE = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b, "=": (a, b) => a === b };
const SORTS = [["", "in the dump's order"], ["-problems", "most problems"], ["reward", "lowest reward"], ["-reward", "highest reward"],
  ["-turns", "most turns"], ["-length", "longest"], ["length", "shortest"], ["-drift", "most drift"], ["-dropped", "most dropped"],
  ["-seconds", "slowest"], ["status", "status"], ["stop", "stop reason"]];

function matcher(text) {
  const tests = [];
  for (const word of text.toLowerCase().split(/\s+/).filter(Boolean)) {
    const found = /^([a-z]+)(<=|>=|<|>|=)(-?\d*\.?\d+)$/.exec(word);
    if (found && FIELDS[found[1]]) {
      const [field, holds, limit] = [FIELDS[found[1]], COMPARE[found[2]], Number(found[3])];
      tests.push((row) => { const value = field(row); return value !== null && value !== undefined && holds(value, limit); });
    } else tests.push((row) => haystack(row).includes(word));
  }
  return (row) => tests.every((test) => test(row));
}

function haystack(row) {
  if (row.haystack === undefined) {
    row.haystack = [row.asked, row.final, row.label, row.status, row.stop, row.where, row.part, "#" + row.index, ...row.problems].join("\n").toLowerCase();
  }
  return row.haystack;
}

function applyFilters() {
  const matches = matcher(byId("query").value);
  const [status, stop] = [byId("status").value, byId("stop").value];
  state.shown = state.rows.filter((row) => (!status || row.status === status) && (!stop || row.stop === stop)
    && (!state.onlyProblems || row.problems.length) && matches(row)).map((row) => row.position);
  sortShown(byId("sort").value);
  byId("count").textContent = state.shown.length === state.rows.length ? counted(state.rows.length, "sample") : `${state.shown.length} of ${state.rows.length}`;
  byId("rows").style.height = state.shown.length * ROW_HEIGHT + "px";
  drawRows();
}

function sortShown(chosen) {
  if (!chosen) return;
  const [name, sign] = chosen.startsWith("-") ? [chosen.slice(1), -1] : [chosen, 1];
  const key = FIELDS[name] || ((row) => row[name]);
  state.shown.sort((a, b) => {
    const [first, second] = [key(state.rows[a]), key(state.rows[b])];
    const [none, other] = [first === null || first === undefined, second === null || second === undefined];
    if (none || other) return none - other || a - b; // what is not known comes last
    return (first < second ? -sign : first > second ? sign : 0) || a - b;
  });
}

function drawRows() {
  const viewport = byId("viewport");
  const first = Math.max(0, Math.floor(viewport.scrollTop / ROW_HEIGHT) - 5);
  const last = Math.min(state.shown.length, Math.ceil((viewport.scrollTop + (viewport.clientHeight || 800)) / ROW_HEIGHT) + 5);
  const drawn = [];
  for (let place = first; place < last; place += 1) drawn.push(rowElement(state.rows[state.shown[place]], place));
  if (!state.shown.length) drawn.push(make("p", "empty", state.rows.length ? "no sample matches" : "no samples yet"));
  byId("rows").replaceChildren(...drawn);
  viewport.setAttribute("aria-activedescendant", byId("row" + state.picked) ? "row" + state.picked : "");
}

function rowElement(row, place) {
  const element = make("div", "row" + (row.position === state.picked ? " picked" : ""));
  element.style.top = place * ROW_HEIGHT + "px";
  element.dataset.position = row.position;
  element.id = "row" + row.position;
  element.setAttribute("role", "option");
  element.setAttribute("aria-selected", String(row.position === state.picked));
  const above = make("div", "", "", make("span", "dim", "#" + (row.index ?? row.position)), rewardBadge(row), make("span", "asked", row.asked || row.final));
  const facts = [counted(row.turns, "turn"), `${number(row.length)} tok`];
  if (row.group !== null) facts.push(`group ${row.group}`);
  if (row.part) facts.push(row.part);
  const below = make("div", "small", "", endBadge(row));
  if (row.problems.length) below.append(make("span", "badge " + problemTone(row.problems[0]), row.problems.length > 1 ? `${row.problems[0]} +${row.problems.length - 1}` : row.problems[0]));
  if (row.drift) below.append(make("span", "badge drifted", `drift ${row.drift}`));
  below.append(make("span", "", facts.join(" · ")));
  element.append(above, below);
  return element;
}

// tokens of older weights are told, and are no fault where a run asks for them
function problemTone(kind) { return kind === "stale version" ? "older" : "problem"; }

function counted(count, name) { return `${number(count)} ${name}${count === 1 ? "" : "s"}`; }

// Why it ended, where that says more than the status; both where they contradict each other.
function endBadge(row) {
  const says = row.stop && row.stop !== row.status && row.stop !== "completed";
  return make("span", "badge " + row.status, !says ? row.status : row.status === "completed" ? `${row.status}: ${row.stop}` : row.stop);
}

function rewardBadge(row) {
  const tone = row.reward === null ? "dim" : row.reward > 0 ? "right" : "wrong";
  return make("span", "reward " + tone, row.reward === null ? "–" : number(row.reward));
}

function fillSelect(id, first, values) {
  const select = byId(id);
  const before = select.value;
  select.replaceChildren(...[["", first], ...values].map(([value, text]) => { const o = make("option", "", text); o.value = value; return o; }));
  select.value = before;
  if (select.selectedIndex < 0) select.value = "";
}

function fillFilters() {
  const counted = (key) => {
    const counts = new Map();
    for (const row of state.rows) if (row[key]) counts.set(row[key], (counts.get(row[key]) || 0) + 1);
    return [...counts].sort((a, b) => b[1] - a[1]).map(([value, count]) => [value, `${value} (${count})`]);
  };
  fillSelect("status", "any status", counted("status"));
  fillSelect("stop", "any stop reason", counted("stop"));
}

function revealPicked() {
  const place = state.shown.indexOf(state.picked);
  if (place < 0) return;
  const viewport = byId("viewport");
  const top = place * ROW_HEIGHT;
  if (top < viewport.scrollTop) viewport.scrollTop = top;
  else if (top + ROW_HEIGHT > viewport.scrollTop + viewport.clientHeight) viewport.scrollTop = top + ROW_HEIGHT - viewport.clientHeight;
}
