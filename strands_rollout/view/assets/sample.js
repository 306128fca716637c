// The pane of one sample, and of all groups.

const VIEWS = [["talk", "conversation"], ["tokens", "tokens"], ["facts", "facts"]];

async function openSample(position, { view = state.view, token = null } = {}) {
  if (!state.rows[position]) return;
  Object.assign(state, { picked: position, view, token, byGroup: false });
  document.body.classList.add("opened");
  revealPicked();
  drawRows();
  writeHash();
  let detail = null;
  try {
    detail = await readDetail(position);
  } catch (error) {
    banner(`sample ${position} can't be read: ${error.message}`);
    return;
  }
  if (state.picked === position) timed("open", () => drawSample(state.rows[position], detail));
}

function openToken(token) { void openSample(state.picked, { view: "tokens", token }); }

function drawSample(row, detail) {
  const pane = byId("sample");
  const body = make("div");
  pane.replaceChildren(sampleHead(row), ...errorLine(detail), ...foundBox(detail), ...timeline(row, detail), ...siblings(row), tabs(), body);
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
  const back = button("", "‹ list", closeSample);
  back.id = "back";
  const head = make("div", "head", "", back, make("h2", "", "#" + (row.index ?? row.position)), make("span", "badge " + row.status, row.status));
  if (row.stop && row.stop !== row.status) head.append(make("span", "badge " + row.status, row.stop));
  head.append(rewardBadge(row));
  if (row.label) head.append(make("span", "dim", "label " + row.label));
  if (row.advantage !== null) head.append(make("span", "dim", "advantage " + signed(row.advantage)));
  const counts = `${number(row.turns)} turns · ${number(row.calls)} calls · ${number(row.length)} tokens, ${row.trained} trained` + (row.drift === null ? "" : ` · drift ${row.drift}`);
  head.append(make("span", "dim", counts), make("span", "where", row.where));
  return head;
}

function errorLine(detail) {
  return detail.facts && detail.facts.error ? [make("p", "error", String(detail.facts.error))] : [];
}

function foundBox(detail) {
  if (!detail.problems.length) return [];
  const list = make("ul");
  for (const [kind, text, start] of detail.problems.slice(0, 12)) {
    const words = start === null ? text : `${text} (token ${start})`;
    list.append(make("li", "", "", make("b", "wrong", kind + ": "), start === null ? make("span", "", words) : button("", words, () => openToken(start))));
  }
  if (detail.problems.length > 12) list.append(make("li", "dim", `and ${detail.problems.length - 12} more`));
  return [make("div", "found", "", make("b", "wrong", detail.problems.length === 1 ? "1 problem" : `${detail.problems.length} problems`), list)];
}

function timeline(row, detail) {
  const times = row.times;
  if (!times || !times.all) return [];
  const [bar, words] = [make("div", "time"), make("div", "time-words dim")];
  const sums = ["generate", "tool", "wait"].map((name) => ({ kind: name, s: times[name], words: name }));
  for (const step of steps(times, detail) || sums) {
    const part = make("span", step.kind);
    part.style.flex = `${1000 * step.s} 1 0`;
    part.title = `${step.words}, ${seconds(step.s)}`;
    bar.append(part);
  }
  for (const sum of sums) words.append(make("span", "key " + sum.kind), `${sum.kind} ${sum.s.toFixed(2)} s`);
  return [bar, words];
}

// each turn and the tools that it called, one after the other; what is left of the episode is at the end
function steps(times, detail) {
  const turns = detail.facts && detail.facts.turn_s;
  if (!Array.isArray(turns) || detail.facts.segments > 1) return null;
  const found = [];
  turns.forEach((s, at) => {
    found.push({ kind: "generate", s, words: `turn ${at + 1}` });
    const calls = callsOf(detail, at);
    if (!calls.length) return;
    const queued = Math.min(...calls.map((call) => (call.sandbox && call.sandbox.queued_s) || 0));
    if (queued) found.push({ kind: "wait", s: queued, words: "waiting for a place in the sandbox" });
    const s_all = Math.max(...calls.map((call) => call.s)) - queued;
    found.push({ kind: "tool", s: s_all, words: calls.map(callWords).join("; ") });
  });
  const left = times.all - found.reduce((sum, step) => sum + step.s, 0);
  if (left > 0) found.push({ kind: "wait", s: left, words: "the rest of the episode" });
  return found;
}

// what the facts say of the calls that a turn made, the first turn being 0
function callsOf(detail, turn) {
  const calls = detail.facts && detail.facts.calls;
  if (!Array.isArray(calls) || detail.facts.segments > 1) return [];
  return calls.filter((call) => call && typeof call.s === "number" && String(call.id).startsWith(`call_${turn + 1}_`));
}

function callWords(call) {
  const words = [`${call.tool}: ${call.status}`];
  const box = call.sandbox;
  if (box) {
    if (typeof box.exit_code === "number") words.push(`exit ${box.exit_code}`);
    if (box.killed_by) words.push(String(box.killed_by));
    if (typeof box.run_s === "number") words.push(`ran ${seconds(box.run_s)}`);
    if (box.queued_s > 0.001) words.push(`waited ${seconds(box.queued_s)}`);
  }
  return words.join(", ");
}

function seconds(s) { return s < 0.1 ? `${(1000 * s).toFixed(1)} ms` : `${s.toFixed(2)} s`; }

function siblings(row) {
  if (row.group === null || row.group === undefined) return [];
  const others = state.rows.filter((other) => groupKey(other) === groupKey(row));
  if (others.length < 2) return [];
  const strip = make("div", "siblings", "", make("span", "dim", `group ${row.group}:`));
  for (const other of others) {
    const text = `${number(other.reward)} (${other.advantage === null ? "–" : signed(other.advantage)})`;
    const chip = button((other === row ? "picked " : "") + (other.reward > 0 ? "right" : "wrong"), text, () => void openSample(other.position));
    chip.title = `sample #${other.index}: reward, and advantage within its group`;
    strip.append(chip);
  }
  return [strip];
}

function signed(value) { return (value > 0 ? "+" : "") + value.toFixed(2); }

function tabs() {
  return make("div", "tabs", "", ...VIEWS.map(([view, text]) => {
    const tab = button("", text, () => void openSample(state.picked, { view }));
    tab.setAttribute("aria-pressed", String(state.view === view));
    return tab;
  }));
}

function factsView(detail, target) {
  for (const name of ["facts", "reward", "label", "metadata"]) {
    if (detail[name] === null || detail[name] === undefined) continue;
    target.append(card("", [name === "facts" ? "facts of the episode" : name], make("pre", "", JSON.stringify(detail[name], null, 2))));
  }
}

// files of a folder number their groups each for itself
function groupKey(row) { return row.file + ":" + row.group; }

// All groups of what the filters leave, each side by side.
function drawGroups() {
  const groups = new Map();
  for (const position of state.shown) {
    const row = state.rows[position];
    if (row.group === null || row.group === undefined) continue;
    if (!groups.has(groupKey(row))) groups.set(groupKey(row), []);
    groups.get(groupKey(row)).push(row);
  }
  const back = button("", "‹ list", closeSample);
  back.id = "back";
  const pane = byId("sample");
  pane.replaceChildren(make("div", "head", "", back, make("h2", "", `${groups.size} groups`)));
  if (!groups.size) pane.append(make("p", "empty", "no sample here says which group it is of"));
  const entries = [...groups];
  const more = (from) => {
    for (const [, rows] of entries.slice(from, from + 20)) pane.append(groupBlock(rows));
    if (from + 20 < entries.length) {
      const next = button("", `${entries.length - from - 20} more groups`, () => { next.remove(); more(from + 20); });
      pane.append(next);
    }
  };
  more(0);
  pane.scrollTop = 0;
}

function groupBlock(rows) {
  const rewards = rows.map((row) => row.reward).filter((reward) => reward !== null);
  const mean = rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
  const block = make("div", "wide", "", make("h3", "", `group ${rows[0].group} · ${rows.length} samples · mean reward ${number(mean)} · ${rows[0].asked}`));
  block.append(make("div", "columns", "", ...rows.map(groupCard)));
  return block;
}

function groupCard(row) {
  const element = card(row.status === "completed" ? "turn" : "dropped", []);
  element.firstChild.append(make("span", "", "#" + row.index), rewardBadge(row), endBadge(row));
  if (row.problems.length) element.firstChild.append(make("span", "badge problem", String(row.problems.length)));
  if (row.advantage !== null) {
    const bar = make("span", row.advantage < 0 ? "minus" : "");
    const share = Math.min(50, Math.abs(row.advantage) * 20);
    bar.style.width = share + "%";
    bar.style.left = (row.advantage < 0 ? 50 - share : 50) + "%";
    element.append(make("div", "dim", "advantage " + signed(row.advantage)), make("div", "signed", "", bar));
  }
  element.append(make("div", "", row.final.split("</think>").pop().trim() || "(no final words)"));
  element.addEventListener("click", () => void openSample(row.position));
  return element;
}
