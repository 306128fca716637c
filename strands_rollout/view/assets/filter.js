// Filters and sorting of samples: words, fields, and select lists.

const FIELDS = {
  reward: (row) => row.reward, right: (row) => row.right, advantage: (row) => row.advantage, step: (row) => row.step, turns: (row) => row.turns, calls: (row) => row.calls,
  errors: failedCalls, length: (row) => row.length, trained: (row) => row.trained, dropped: (row) => row.dropped,
  drift: (row) => row.drift, problems: (row) => row.problems.length, seconds: (row) => row.times && row.times.all,
  versions: (row) => row.versions.length, index: (row) => row.index, group: (row) => row.group,
};
const TEXT_FIELDS = { status: (row) => row.status, stop: (row) => row.stop, label: (row) => row.label, answer: (row) => row.answer, problem: (row) => row.problems, tool: (row) => Object.keys(row.tools), set: (row) => row.set, run: (row) => state.runs[row.run] || "" };
const COMPARE = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b, "=": (a, b) => a === b };
const SORTS = [["", "in the dump's order"], ["-problems", "most problems"], ["reward", "lowest reward"], ["-reward", "highest reward"],
  ["-turns", "most turns"], ["-length", "longest"], ["length", "shortest"], ["-drift", "most drift"], ["-dropped", "most dropped"],
  ["-seconds", "slowest"], ["status", "status"], ["stop", "stop reason"]];
// select lists: [id, label for all values, value of a row, name of a value]
const CHOICES = [
  ["status", "any status", (row) => row.status, (value) => value], ["stop", "any stop reason", (row) => row.stop, (value) => value],
  ["step", "any step", (row) => (row.step === null ? "" : String(row.step)), (value) => `step ${value}`],
  ["set", "any set", (row) => row.set, (value) => value], ["run", "any run", (row) => (state.runs.length ? String(row.run) : ""), (value) => state.runs[value]],
];
const CONTROLS = ["query", ...CHOICES.map(([id]) => id), "sort"];

// Add the parts of rewards to the fields and metrics.
function addRewardParts() {
  for (const name of new Set(state.rows.flatMap((row) => Object.keys(row.parts)))) {
    if (state.parts.has(name)) continue;
    state.parts.add(name);
    const field = name.toLowerCase().replace(/[^\w/]/g, "_");
    const isTaken = Object.hasOwn(FIELDS, field) || Object.hasOwn(TEXT_FIELDS, field);
    FIELDS[isTaken ? `parts/${field}` : field] = (row) => row.parts[name];
    METRICS.splice(2, 0, [name, (rows) => mean(knownValues(rows, (row) => row.parts[name])), compact]);
  }
}

// Return the number of failed calls, summed over tools; code that exits with an error counts as failed. If the sum is 0, return the
// episode's own count, if known.
function failedCalls(row) {
  const ofTools = Object.values(row.tools).reduce((sum, [, failed]) => sum + failed, 0);
  return ofTools || row.errors === null ? ofTools : row.errors;
}

const WORD = /(?:([a-z_][\w/]*)=)?"([^"]*)"?|\S+/gi;

// Parse words, `field<number`, `field=value` and `field="a value"`; an unknown field gives a hint and is searched as text.
function parseQuery(text) {
  const [tests, hints] = [[], []];
  for (const [word, name, quoted] of text.toLowerCase().matchAll(WORD)) {
    const found = name ? ["", name, "=", quoted] : quoted === undefined ? /^([a-z_][\w/]*)(<=|>=|<|>|=)(.*)$/.exec(word) : null;
    const [test, hint] = found ? parseFieldTest(...found.slice(1)) : [null, ""];
    if (hint) hints.push(hint);
    const sought = quoted ?? word;
    tests.push(test || ((row) => haystack(row).includes(sought)));
  }
  return { matches: (row) => tests.every((test) => test(row)), hints };
}

function parseFieldTest(name, sign, value) {
  const known = [...Object.keys(FIELDS), ...Object.keys(TEXT_FIELDS)];
  const limit = Number(value);
  if (!Object.hasOwn(FIELDS, name) && !Object.hasOwn(TEXT_FIELDS, name)) {
    const near = known.map((other) => [editDistance(name, other), other]).sort((a, b) => a[0] - b[0])[0];
    return [null, `unknown field "${name}"` + (near[0] <= 2 ? `; did you mean "${near[1]}"?` : ";") + ` searched as text. Fields: ${known.join(", ")}`];
  }
  const isText = Object.hasOwn(TEXT_FIELDS, name) || name === "group";
  if (sign === "=" && value && isText) {
    const field = TEXT_FIELDS[name] || FIELDS[name];
    return [(row) => [field(row) ?? ""].flat().some((own) => String(own).toLowerCase() === value), ""];
  }
  if (Object.hasOwn(TEXT_FIELDS, name)) return [null, `"${name}" expects = and a word, such as ${name}=${name === "status" ? "failed" : "word"}; searched as text`];
  if (!value || Number.isNaN(limit)) return [null, `"${name}${sign}" expects a number, got "${value}"; searched as text`];
  const [field, holds] = [FIELDS[name], COMPARE[sign]];
  return [(row) => { const found = field(row); return found !== null && found !== undefined && holds(found, limit); }, ""];
}

// Return the edit distance of two words.
function editDistance(one, other) {
  let before = [...Array(other.length + 1).keys()];
  for (let i = 1; i <= one.length; i += 1) {
    const now = [i];
    for (let j = 1; j <= other.length; j += 1) now.push(Math.min(before[j] + 1, now[j - 1] + 1, before[j - 1] + (one[i - 1] !== other[j - 1])));
    before = now;
  }
  return before[other.length];
}

function haystack(row) {
  if (row.haystack === undefined) {
    row.haystack = [row.asked, row.final, row.answer, row.label, row.status, row.stop, row.where, row.part, ...Object.keys(row.tools), "#" + row.index, ...row.problems].join("\n").toLowerCase();
  }
  return row.haystack;
}

function applyFilters() {
  const { matches, hints } = parseQuery(byId("query").value);
  const chosen = CHOICES.map(([id, , valueOf]) => [id, byId(id).value, valueOf]).filter(([, value]) => value);
  const searched = state.rows.filter((row) => (!state.onlyProblems || row.problems.length) && matches(row));
  const chosenExcept = (ignored) => searched.filter((row) => chosen.every(([id, value, valueOf]) => id === ignored || valueOf(row) === value));
  state.shown = chosenExcept("").map((row) => row.position);
  state.ofAnyStep = chosenExcept("step");
  sortShown(byId("sort").value);
  byId("count").textContent = state.shown.length === state.rows.length ? pluralize(state.rows.length, "sample") : `${state.shown.length} of ${state.rows.length}`;
  byId("hint").textContent = hints.join("\n");
  byId("hint").hidden = !hints.length;
  byId("rows").style.height = state.shown.length * ROW_HEIGHT + "px";
  drawRows();
}

// Replace a field's words in the query by the given words; if all of these are present, only remove the field's words.
function toggleWords(name, words) {
  const before = byId("query").value.match(WORD) || [];
  const hasWords = words.every((word) => before.includes(word));
  const others = before.filter((word) => !new RegExp(`^${name}[<>=]`).test(word));
  byId("query").value = [...others, ...(hasWords ? [] : words)].join(" ");
  filtersChanged();
}

function toggleChoice(id, value) {
  byId(id).value = byId(id).value === value ? "" : value;
  filtersChanged();
}

function clearFilters() {
  for (const id of CONTROLS) byId(id).value = "";
  setOnlyProblems(false);
  filtersChanged();
}

function sortShown(chosen) {
  if (!chosen) return;
  const [name, sign] = chosen.startsWith("-") ? [chosen.slice(1), -1] : [chosen, 1];
  const key = FIELDS[name] || ((row) => row[name]);
  state.shown.sort((a, b) => {
    const [first, second] = [key(state.rows[a]), key(state.rows[b])];
    const [none, other] = [first === null || first === undefined, second === null || second === undefined];
    if (none || other) return none - other || a - b; // unknown values come last
    return (first < second ? -sign : first > second ? sign : 0) || a - b;
  });
}

function fillSelect(id, first, values) {
  const select = byId(id);
  const before = select.value;
  select.replaceChildren(...[["", first], ...values].map(([value, text]) => { const o = make("option", "", text); o.value = value; return o; }));
  select.value = before;
  if (select.selectedIndex < 0) select.value = "";
}

function fillFilters() {
  for (const [id, first, valueOf, nameOfValue] of CHOICES) {
    const counts = new Map();
    for (const row of state.rows) { const value = valueOf(row); if (value) counts.set(value, (counts.get(value) || 0) + 1); }
    const inOrder = [...counts].sort((a, b) => (id === "step" || id === "run" ? a[0] - b[0] : b[1] - a[1]));
    fillSelect(id, first, inOrder.map(([value, count]) => [value, `${nameOfValue(value)} (${count})`]));
    byId(id).hidden = counts.size < 2 && !["status", "stop"].includes(id);
  }
}
