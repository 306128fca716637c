// The timeline: requests to the policy, tool calls, and waiting.

const LANE_HEIGHT = 9;

// results of eval have only the total time
function isSplit(row) { return row.times && row.times.generate + row.times.tool > 0; }

function timeline(row, detail) {
  const sums = isSplit(row) && row.times.all ? ["generate", "tool", "wait"].map((kind) => ({ kind, s: row.times[kind], words: kind })) : [];
  const ends = detail.steps.map(([, at, s]) => at + s);
  const all = Math.max(row.times ? row.times.all : 0, ...ends);
  if (!all) return [];
  if (!sums.length && !detail.steps.length) return [make("div", "time-words dim", "", make("b", "", "time"), seconds(all))];
  const bar = detail.steps.length ? timedBar(detail, all) : untimedBar(row.times, detail, sums);
  const words = make("div", "time-words dim", "", make("b", "", "time"));
  for (const sum of sums) words.append(legendItem(sum.kind, `${sum.kind} ${sum.s.toFixed(2)} s`));
  if (bar.querySelector(".wait") && detail.steps.length) words.append(legendItem("queued", "waiting for a free sandbox"));
  words.append(make("span", "gap"), detail.steps.length ? `0 to ${seconds(all)}` : "in order; start times were not recorded");
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", `timeline of ${seconds(all)}: ` + sums.map((sum) => `${sum.kind} ${sum.s.toFixed(2)} s`).join(", "));
  return [bar, words];
}

// Draw each step at its start time; concurrent steps are stacked, and gaps are waiting.
function timedBar(detail, all) {
  const bar = make("div", "time placed");
  const lanes = [];
  for (const [kind, at, s, turn, place] of detail.steps) {
    let lane = lanes.findIndex((end) => end <= at + 1e-4);
    if (lane < 0) lane = lanes.push(0) - 1;
    lanes[lane] = at + s;
    const call = place === null ? null : detail.facts.calls[place];
    const part = make("span", kind);
    part.title = `${call ? describeCall(call) : describeTurn(turn)}, ${seconds(s)}, from ${seconds(at)} on`;
    Object.assign(part.style, { left: (100 * at) / all + "%", width: (100 * s) / all + "%", top: lane * LANE_HEIGHT + "px" });
    const queued = call && call.sandbox ? Math.min(call.sandbox.queued_s || 0, s) : 0;
    if (queued > 0) part.append(waitBar(queued / s));
    part.addEventListener("click", () => toTurn(call ? turnOfCall(call) : turn));
    bar.append(part);
  }
  bar.style.height = lanes.length * LANE_HEIGHT - 1 + "px";
  return bar;
}

function waitBar(share) {
  const part = make("span", "wait");
  part.style.width = 100 * share + "%";
  return part;
}

function describeTurn(turn) { return turn === null ? "a request" : `turn ${turn + 1}`; }

// Return the turn of a call, from 0; null if its id does not name one.
function turnOfCall(call) {
  const found = /^call_(\d+)_\d+$/.exec(String(call.id));
  return found ? Number(found[1]) - 1 : null;
}

async function toTurn(turn) {
  if (turn === null) return;
  if (state.view !== "talk") await openSample(state.picked, { view: "talk" });
  const card = document.querySelector(`[data-turn="${turn}"]`);
  if (card) card.scrollIntoView({ block: "start" });
}

// Draw each turn and its calls one after the other, for a dump without start times.
function untimedBar(times, detail, sums) {
  const bar = make("div", "time");
  for (const step of stepsInOrder(times, detail) || sums) {
    const part = make("span", step.kind);
    part.style.flex = `${1000 * step.s} 1 0`;
    part.title = `${step.words}, ${seconds(step.s)}`;
    bar.append(part);
  }
  return bar;
}

function stepsInOrder(times, detail) {
  const turns = detail.facts && detail.facts.turn_s;
  if (!Array.isArray(turns) || detail.facts.segments > 1) return null;
  const found = [];
  turns.forEach((s, at) => {
    found.push({ kind: "generate", s, words: `turn ${at + 1}` });
    const calls = callsOf(detail, at);
    if (!calls.length) return;
    const queued = Math.min(...calls.map((call) => (call.sandbox && call.sandbox.queued_s) || 0));
    if (queued) found.push({ kind: "wait", s: queued, words: "waiting for a free sandbox" });
    const toolSeconds = Math.max(...calls.map((call) => call.s)) - queued;
    found.push({ kind: "tool", s: toolSeconds, words: calls.map(describeCall).join("; ") });
  });
  const left = times.all - found.reduce((sum, step) => sum + step.s, 0);
  if (left > 0) found.push({ kind: "wait", s: left, words: "the rest of the episode" });
  return found;
}

// Return the recorded calls of a turn; the first turn is 0.
function callsOf(detail, turn) {
  const calls = detail.facts && detail.facts.calls;
  if (!Array.isArray(calls) || detail.facts.segments > 1) return [];
  return calls.filter((call) => call && typeof call.s === "number" && turnOfCall(call) === turn);
}

function describeCall(call) {
  const words = [`${call.tool}: ${call.status}`];
  const box = call.sandbox;
  if (box) {
    if (typeof box.exit_code === "number") words.push(`exit ${box.exit_code}`);
    if (box.killed_by) words.push(String(box.killed_by));
    if (typeof box.run_s === "number") words.push(`ran ${seconds(box.run_s)}`);
    if (typeof box.queued_s === "number" && box.queued_s > 0.001) words.push(`waited ${seconds(box.queued_s)}`);
  }
  return words.join(", ");
}

function seconds(s) { return s < 0.1 ? `${(1000 * s).toFixed(1)} ms` : `${s.toFixed(2)} s`; }
