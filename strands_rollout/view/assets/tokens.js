// A sample token by token.

const AT_ONCE = 3000;
const MOST_ALIKE = 8;
const LEGEND = [["prompt", "prompt"], ["context", "context, not trained"], ["trained", "trained"], ["failed", "dropped: failed"],
  ["removed", "dropped: removed"], ["stale", "dropped: stale"], ["masked", "masked, no reason told"], ["unknown", "no mask"]];

function tokensView(detail, target) {
  target.append(legend(detail));
  const marks = tokenMarks(detail);
  const waiting = [];
  let drawn = 0;
  for (const stretch of stretches(detail)) {
    const size = stretch.end - stretch.start;
    const [block, tokens] = tokenBlock(detail, stretch);
    const draw = () => tokens.append(...tokenElements(detail, marks, stretch.start, stretch.end));
    if (stretch.kind === "prompt" && size > 200 && !(state.token !== null && state.token < stretch.end)) foldPrompt(block, tokens, draw);
    else if (drawn < AT_ONCE || (state.token !== null && state.token >= stretch.start)) { draw(); drawn += size; }
    else waiting.push([block, draw]);
    target.append(block);
  }
  drawLater(waiting);
}

function drawLater(waiting) {
  const next = () => {
    if (!waiting.length || !waiting[0][0].isConnected) return;
    waiting.shift()[1]();
    setTimeout(next);
  };
  setTimeout(next);
}

function foldPrompt(block, tokens, draw) {
  const open = button("", "show", () => { draw(); open.remove(); tokens.hidden = false; });
  tokens.hidden = true;
  block.firstChild.append(" ", open);
}

function tokenBlock(detail, stretch) {
  const version = stretch.turn && stretch.turn.versions.some((v) => v !== null) ? " · weights " + stretch.turn.versions.join(", ") : "";
  const name = stretch.turn ? `turn ${stretch.turn.turn + 1}` : stretch.kind;
  const title = make("h3", "", `${name} · tokens ${stretch.start}–${stretch.end - 1}${version}`);
  const tokens = make("div", "tokens");
  return [make("div", "block", "", title, tokens), tokens];
}

function countKinds(detail) {
  const counts = new Map();
  for (const [kind, start, end] of detail.kinds) counts.set(kind, (counts.get(kind) || 0) + end - start);
  return LEGEND.filter(([kind]) => counts.has(kind)).map(([kind, text]) => [kind, text, counts.get(kind)]);
}

// A bar of all tokens in order, colored by kind; a click leads to the token.
function tokenBar(detail) {
  if (!detail.ids.length) return [];
  const bar = make("div", "token-bar");
  for (const [kind, start, end] of detail.kinds) {
    const part = make("span", "k-" + kind);
    part.style.flex = `${end - start} 1 0`;
    part.title = `${kind}: tokens ${start} to ${end - 1}`;
    part.addEventListener("click", () => openToken(start));
    bar.append(part);
  }
  const counts = countKinds(detail);
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", "tokens: " + counts.map(([, text, count]) => `${text} ${count}`).join(", "));
  const words = make("div", "time-words dim", "", make("b", "", "tokens"), ...counts.map(([kind, text, count]) => keyed("k-" + kind, `${text} ${count}`)));
  return [bar, words];
}

function legend(detail) {
  const shown = countKinds(detail).map(([kind, text, count]) => make("span", "t " + kind, `${text} ${count}`));
  if (detail.logprobs.length) {
    const names = ["> 0.95", "> 0.74", "> 0.37", "> 0.05", "less"];
    shown.push(make("span", "", "", make("span", "dim", "probability "), ...names.map((name, place) => make("span", "t trained" + (place ? " p" + place : ""), name))));
  }
  if (detail.problems.some(([kind, , start]) => start !== null && problemTone(kind) === "problem")) shown.push(make("span", "t odd", "a problem"));
  if (detail.problems.some(([kind]) => problemTone(kind) === "older")) shown.push(make("span", "t old", "older weights"));
  if (detail.drift) shown.push(make("span", "t drift", `would be retokenised ${detail.drift.reduce((sum, [s, e]) => sum + e - s, 0)}`));
  else shown.push(make("span", "dim", "drift: open with --tokenizer to see it"));
  return make("div", "legend", "", ...shown);
}

function tokenMarks(detail) {
  const marks = { drift: new Map(), instead: new Map(), odd: new Map(), old: new Map() };
  for (const [start, end, ids] of detail.drift || []) {
    for (let i = start; i < end; i += 1) marks.drift.set(i, ids);
    marks.instead.set(Math.max(start, end - 1), ids);
  }
  for (const [kind, text, start, end] of detail.problems) {
    if (start === null) continue;
    for (let i = start; i < end; i += 1) marks[kind === "stale version" ? "old" : "odd"].set(i, text);
  }
  return marks;
}

function tokenElements(detail, marks, start, end) {
  const made = [];
  for (let i = start; i < end; i += 1) {
    let className = "t " + detail.kindOf[i];
    const logprob = detail.logprobs[i - detail.prompt];
    if (logprob < -0.05) className += logprob < -3 ? " p4" : logprob < -1 ? " p3" : logprob < -0.3 ? " p2" : " p1";
    if (marks.drift.has(i)) className += " drift";
    if (marks.odd.has(i)) className += " odd";
    if (marks.old.has(i)) className += " old";
    if (i === state.token) className += " picked";
    const same = alikeFrom(detail, marks, i, end);
    const element = make("span", className, shownToken(detail, detail.ids[i]) + (same > 1 ? ` × ${same}` : ""));
    element.dataset.i = i;
    made.push(element);
    i += same - 1;
    if (marks.instead.has(i)) made.push(make("span", "instead", "→ " + marks.instead.get(i).map((id) => shownToken(detail, id).trim() || "␠").join("|")));
  }
  return made;
}

// An image is hundreds of equal context tokens, which are shown as one.
function alikeFrom(detail, marks, i, end) {
  if (detail.kindOf[i] !== "context" && detail.kindOf[i] !== "prompt") return 1;
  let to = i + 1;
  while (to < end && detail.ids[to] === detail.ids[i] && detail.kindOf[to] === detail.kindOf[i] && !marks.odd.has(to) && to !== state.token) to += 1;
  return to - i > MOST_ALIKE ? to - i : 1;
}

function shownToken(detail, id) {
  const bytes = detail.bytes.get(id);
  if (bytes === undefined) return `⟨${id}⟩`;
  if (!bytes.length) return "∅";
  try {
    return shownText(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  } catch {
    return "⟨" + hex(bytes) + "⟩";
  }
}

function shownText(text) {
  return visible(text).replace(/\t/g, "⇥").replace(/\n/g, "↵\n");
}

function hex(bytes) { return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join(" "); }

function tokenFacts(detail, i) {
  const id = detail.ids[i];
  const bytes = detail.bytes.get(id);
  const lines = [`token ${i}   id ${id}`];
  if (bytes) lines.push(`text ${JSON.stringify(new TextDecoder().decode(bytes))}`, `bytes ${hex(bytes)}`);
  const logprob = detail.logprobs[i - detail.prompt];
  if (logprob !== undefined) lines.push(logprob === null ? "logprob not finite" : `logprob ${logprob.toFixed(3)}   p ${Math.exp(logprob).toFixed(3)}`);
  const span = detail.spans.find(([, start, end]) => start <= i && i < end);
  lines.push(`${detail.kindOf[i]}   mask ${detail.maskOf[i] ?? "–"}`);
  if (span) lines.push(`turn ${span[0] + 1}   weights ${span[3] ?? "not told"}`);
  for (const [start, end, ids] of detail.drift || []) {
    if (start <= i && i < end) lines.push(`encoded again: ${ids.map((other) => `${other} ${JSON.stringify(shownToken(detail, other))}`).join(", ") || "nothing"}`);
  }
  for (const [kind, text, start, end] of detail.problems) if (start !== null && start <= i && i < end) lines.push(`${kind}: ${text}`);
  return lines.join("\n");
}

function showTip(detail, element) {
  const tip = byId("tip");
  tip.textContent = visible(tokenFacts(detail, Number(element.dataset.i)));
  tip.hidden = false;
  const box = element.getBoundingClientRect();
  const below = box.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.top = (below ? box.bottom + 6 : Math.max(4, box.top - 6 - tip.offsetHeight)) + "px";
  tip.style.left = Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 4)) + "px";
}
