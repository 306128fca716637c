// The list of samples; only visible rows are drawn.

const ROW_HEIGHT = 76;
const LAST_CONTROL = /<\|[^|<>\s]+\|>\s*$/;

function drawRows() {
  const viewport = byId("viewport");
  const first = Math.max(0, Math.floor(viewport.scrollTop / ROW_HEIGHT) - 5);
  const last = Math.min(state.shown.length, Math.ceil((viewport.scrollTop + (viewport.clientHeight || 800)) / ROW_HEIGHT) + 5);
  const drawn = [];
  for (let place = first; place < last; place += 1) drawn.push(rowElement(state.rows[state.shown[place]], place));
  if (!state.shown.length) drawn.push(make("p", "empty", state.rows.length ? "no sample matches" : "no samples"));
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
  const above = make("div", "", "", ...runBadge(row), make("span", "dim", nameOf(row)), make("span", "asked", row.asked || finalAnswer(row) || row.final));
  const facts = [pluralize(row.turns, "turn"), `${number(row.length)} tok`];
  if (row.step !== null) facts.push(`step ${row.step}`);
  if (row.group !== null) facts.push(`group ${row.group}`);
  if (row.part) facts.push(row.part);
  const below = make("div", "small", "", endBadge(row));
  if (row.problems.length) below.append(make("span", "badge " + problemTone(row.problems[0]), row.problems.length > 1 ? `${row.problems[0]} +${row.problems.length - 1}` : row.problems[0]));
  if (row.drift) below.append(make("span", "badge drifted", `drift ${row.drift}`));
  below.append(make("span", "facts", facts.join(" · ")));
  element.append(above, make("div", "small", "", ...verdictParts(row)), below);
  return element;
}

function nameOf(row) { return "#" + (row.index ?? row.position); }

function runBadge(row) { return state.runs.length ? [make("span", `badge run run${row.run}`, state.runs[row.run])] : []; }

// Return "right" or "wrong" by the reward's accuracy. Without an accuracy, a reward above 0 is right; without a reward,
// return "dim".
function toneOf(row) {
  if (row.right !== null) return row.right > 0 ? "right" : "wrong";
  return row.reward === null ? "dim" : row.reward > 0 ? "right" : "wrong";
}

// Return elements for the reward, the answer and the label.
function verdictParts(row) {
  const parts = [rewardBadge(row)];
  if (row.answer) parts.push(make("span", "answer " + toneOf(row), "", make("span", "dim", "answered "), make("b", "", row.answer)));
  else if (row.answer === "") parts.push(make("span", "answer " + toneOf(row), "no answer"));
  else if (row.label && finalAnswer(row)) parts.push(make("span", "answer " + toneOf(row), "", make("span", "dim", "said "), visible(finalAnswer(row))));
  if (row.label) parts.push(make("span", "answer", "", make("span", "dim", "label "), visible(row.label)));
  return parts;
}

// tokens of older weights are not a fault: partial and asynchronous rollouts have them
function problemTone(kind) { return kind === "stale version" ? "older" : "problem"; }

// Return the final text without thoughts and the end-of-turn token.
function finalAnswer(row) { return row.final.split("</think>").pop().replace(LAST_CONTROL, "").trim(); }

function pluralize(count, name) { return `${number(count)} ${name}${count === 1 ? "" : "s"}`; }

// Show the stop reason if it says more than the status, and both if they contradict each other.
function endBadge(row) {
  const isInformative = row.stop && row.stop !== row.status && row.stop !== "completed";
  return make("span", "badge " + row.status, !isInformative ? row.status : row.status === "completed" ? `${row.status}: ${row.stop}` : row.stop);
}

function rewardBadge(row) {
  return make("span", "reward " + toneOf(row), "", make("span", "dim", "reward "), number(row.reward));
}

function scrollToPicked() {
  const place = state.shown.indexOf(state.picked);
  if (place < 0) return;
  const viewport = byId("viewport");
  const top = place * ROW_HEIGHT;
  if (top < viewport.scrollTop) viewport.scrollTop = top;
  else if (top + ROW_HEIGHT > viewport.scrollTop + viewport.clientHeight) viewport.scrollTop = top + ROW_HEIGHT - viewport.clientHeight;
}
