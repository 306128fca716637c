// The pane of one sample.

const VIEWS = [["talk", "conversation"], ["tokens", "tokens"], ["facts", "facts"]];

async function openSample(position, { view = state.view, token = null } = {}) {
  if (!state.rows[position]) return;
  Object.assign(state, { picked: position, view, token, pane: "sample" });
  document.body.classList.add("opened");
  scrollToPicked();
  drawRows();
  writeHash();
  let detail = null;
  try {
    detail = await readDetail(position);
  } catch (error) {
    banner(`sample ${position} can't be read: ${error.message}`);
    return;
  }
  if (state.picked === position && state.pane === "sample") timed("open", () => drawSample(state.rows[position], detail));
}

function openToken(token) { void openSample(state.picked, { view: "tokens", token }); }

function drawSample(row, detail) {
  const pane = byId("sample");
  const body = make("div");
  pane.replaceChildren(sampleHead(row), ...verdictLine(row, detail), ...errorLine(detail), ...problemBox(detail), ...tokenBar(detail), ...timeline(row, detail), ...rewardStrips(row), tabs(), body);
  ({ talk: talkView, tokens: tokensView, facts: factsView })[state.view](detail, body);
  body.addEventListener("mouseover", (event) => { const t = event.target.closest(".t[data-i]"); if (t) showTip(detail, t); });
  body.addEventListener("mouseout", () => { byId("tip").hidden = true; });
  body.addEventListener("click", (event) => { const t = event.target.closest(".t[data-i]"); if (t) pickToken(detail, t); });
  byId("tip").hidden = true;
  const picked = body.querySelector(".t.picked");
  if (picked) picked.scrollIntoView({ block: "center" });
  else pane.scrollTop = 0;
}

function pickToken(detail, element) {
  for (const other of document.querySelectorAll(".t.picked")) other.classList.remove("picked");
  element.classList.add("picked");
  state.token = Number(element.dataset.i);
  writeHash();
  showTip(detail, element);
}

function sampleHead(row) {
  const back = button("", "‹ samples", closeSample);
  back.id = "back";
  const head = make("div", "head", "", back, ...runBadge(row), make("h2", "", nameOf(row)), make("span", "badge " + row.status, row.status));
  if (row.stop && row.stop !== row.status) head.append(make("span", "badge " + row.status, row.stop));
  if (row.part) head.append(make("span", "badge", row.part));
  if (row.step !== null) head.append(make("span", "dim", `step ${row.step}`));
  if (row.advantage !== null) head.append(make("span", "dim", "advantage " + signed(row.advantage)));
  const counts = `${pluralize(row.turns, "turn")} · ${pluralize(row.calls, "call")} · ${pluralize(row.length, "token")}, ${row.trained} trained` + (row.drift === null ? "" : ` · drift ${row.drift}`);
  head.append(make("span", "dim", counts), make("span", "where", row.where));
  return head;
}

// A line with the reward, the answer, the label, and the reward's other numbers.
function verdictLine(row, detail) {
  const reward = detail.reward && typeof detail.reward === "object" ? detail.reward : {};
  const line = make("div", "verdict", "", ...verdictParts(row), ...Object.entries(row.parts).map(([name, value]) => make("span", "", "", make("span", "dim", name + " "), number(value, 3))));
  if (typeof reward.error === "string" && reward.error) line.append(make("span", "wrong", "not graded: " + reward.error));
  return [line];
}

function errorLine(detail) {
  return detail.facts && detail.facts.error ? [make("p", "error", String(detail.facts.error))] : [];
}

function problemBox(detail) {
  if (!detail.problems.length) return [];
  const list = make("ul");
  const counts = new Map();
  const first = detail.problems.filter(([kind]) => counts.set(kind, (counts.get(kind) || 0) + 1).get(kind) <= 3).slice(0, 12);
  for (const [kind, text, start] of first) {
    const words = start === null ? text : `${text} (token ${start})`;
    list.append(make("li", "", "", make("b", problemTone(kind) === "older" ? "older" : "wrong", kind + ": "), start === null ? make("span", "", words) : button("", words, () => openToken(start))));
  }
  if (detail.problems.length > first.length) list.append(make("li", "dim", `and ${detail.problems.length - first.length} more`));
  const isOnlyOlder = detail.problems.every(([kind]) => problemTone(kind) === "older");
  const title = isOnlyOlder ? make("b", "older", "several weight versions") : make("b", "wrong", pluralize(detail.problems.length, "problem"));
  return [make("div", "found" + (isOnlyOlder ? " aged" : ""), "", title, list)];
}

// Show the rewards of the sample's group, and other runs' rewards for the same question.
function rewardStrips(row) {
  const strips = [];
  const ofGroup = row.group === null || row.group === undefined ? [] : state.rows.filter((other) => groupKey(other) === groupKey(row));
  if (ofGroup.length > 1) strips.push(rewardStrip(row, `group ${row.group}, rewards${row.advantage === null ? "" : " (advantages)"}:`, ofGroup));
  state.runs.forEach((name, run) => {
    const others = run === row.run || !row.question ? [] : state.rows.filter((other) => other.run === run && other.question === row.question);
    if (others.length) strips.push(rewardStrip(row, `the same question in ${name}:`, others.slice(0, 16)));
  });
  return strips;
}

function rewardStrip(row, title, rows) {
  const strip = make("div", "siblings", "", make("span", "dim", title));
  for (const other of rows) {
    const text = number(other.reward) + (other.advantage === null ? "" : ` (${signed(other.advantage)})`);
    const chip = button((other === row ? "picked " : "") + toneOf(other), text, () => void openSample(other.position));
    chip.title = `sample ${nameOf(other)}: reward, and advantage within its group`;
    strip.append(chip);
  }
  return strip;
}

function signed(value) { return (value > 0 ? "+" : "") + value.toFixed(2); }

function tabs() {
  const bar = make("div", "tabs", "", ...VIEWS.map(([view, text]) => {
    const tab = button("", text, () => void openSample(state.picked, { view }));
    tab.setAttribute("aria-pressed", String(state.view === view));
    return tab;
  }));
  if (state.view === "talk") {
    const toggle = button("", "Markdown", togglePlain);
    toggle.title = "Markdown, formulas and colors, or the raw text (m)";
    toggle.setAttribute("aria-pressed", String(!state.isPlain));
    bar.append(make("span", "gap"), toggle);
  }
  return bar;
}

function factsView(detail, target) {
  for (const name of ["facts", "reward", "label", "metadata"]) {
    if (detail[name] === null || detail[name] === undefined) continue;
    target.append(makeCard("", [name === "facts" ? "facts of the episode" : name], codeBlock(JSON.stringify(detail[name], null, 2), "json")));
  }
}
