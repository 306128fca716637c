// A sample token by token.

const MAX_DRAWN_AT_ONCE = 3000;
const MAX_EQUAL_SHOWN = 8;
const LEGEND = [["prompt", "prompt"], ["context", "context, not trained"], ["trained", "trained"], ["failed", "dropped: failed"],
  ["removed", "dropped: removed"], ["stale", "dropped: stale"], ["masked", "masked, reason unknown"], ["unknown", "no mask"]];

function tokensView(detail, target) {
  target.append(legend(detail));
  const marks = tokenMarks(detail);
  const pending = [];
  let drawn = 0;
  for (const section of sectionsOf(detail)) {
    const size = section.end - section.start;
    const [block, tokens] = tokenBlock(detail, section);
    const draw = () => tokens.append(...tokenElements(detail, marks, section.start, section.end));
    if (section.kind === "prompt" && size > 200 && !(state.token !== null && state.token < section.end)) collapsePrompt(block, tokens, draw);
    else if (drawn < MAX_DRAWN_AT_ONCE || (state.token !== null && state.token >= section.start)) { draw(); drawn += size; }
    else pending.push([block, draw]);
    target.append(block);
  }
  drawPending(pending);
}

function drawPending(pending) {
  const next = () => {
    if (!pending.length || !pending[0][0].isConnected) return;
    pending.shift()[1]();
    setTimeout(next);
  };
  setTimeout(next);
}

function collapsePrompt(block, tokens, draw) {
  const open = button("", "show", () => { draw(); open.remove(); tokens.hidden = false; });
  tokens.hidden = true;
  block.firstChild.append(" ", open);
}

function tokenBlock(detail, section) {
  const version = section.turn && section.turn.versions.some((v) => v !== null) ? " · weights " + section.turn.versions.join(", ") : "";
  const name = section.turn ? `turn ${section.turn.turn + 1}` : section.kind;
  const title = make("h3", "", `${name} · tokens ${section.start}–${section.end - 1}${version}`);
  const tokens = make("div", "tokens");
  return [make("div", "block", "", title, tokens), tokens];
}

function countKinds(detail) {
  const counts = new Map();
  for (const [kind, start, end] of detail.kinds) counts.set(kind, (counts.get(kind) || 0) + end - start);
  return LEGEND.filter(([kind]) => counts.has(kind)).map(([kind, text]) => [kind, text, counts.get(kind)]);
}

// Draw a bar of all tokens in order, colored by kind; a click opens the token.
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
  const words = make("div", "time-words dim", "", make("b", "", "tokens"), ...counts.map(([kind, text, count]) => legendItem("k-" + kind, `${text} ${count}`)));
  return [bar, words];
}

function legend(detail) {
  const shown = countKinds(detail).map(([kind, text, count]) => make("span", "t " + kind, `${text} ${count}`));
  if (detail.logprobs.length) {
    const names = ["> 0.95", "> 0.74", "> 0.37", "> 0.05", "less"];
    shown.push(make("span", "", "", make("span", "dim", "probability "), ...names.map((name, place) => make("span", "t trained" + (place ? " p" + place : ""), name))));
  }
  if (detail.problems.some(([kind, , start]) => start !== null && problemTone(kind) === "problem")) shown.push(make("span", "t flagged", "a problem"));
  if (detail.problems.some(([kind]) => problemTone(kind) === "older")) shown.push(make("span", "t old", "older weights"));
  if (detail.drift) shown.push(make("span", "t drift", `drift, would change if encoded again ${detail.drift.reduce((sum, [s, e]) => sum + e - s, 0)}`));
  else shown.push(make("span", "dim", "drift: not measured; open the dump with --tokenizer"));
  return make("div", "legend", "", ...shown);
}

function tokenMarks(detail) {
  const marks = { drift: new Map(), replacement: new Map(), flagged: new Map(), old: new Map() };
  for (const [start, end, ids] of detail.drift || []) {
    for (let i = start; i < end; i += 1) marks.drift.set(i, ids);
    marks.replacement.set(Math.max(start, end - 1), ids);
  }
  for (const [kind, text, start, end] of detail.problems) {
    if (start === null) continue;
    for (let i = start; i < end; i += 1) marks[kind === "stale version" ? "old" : "flagged"].set(i, text);
  }
  return marks;
}

function tokenElements(detail, marks, start, end) {
  const elements = [];
  for (let i = start; i < end; i += 1) {
    let className = "t " + detail.kindOf[i];
    const logprob = detail.logprobs[i - detail.prompt];
    if (logprob < -0.05) className += logprob < -3 ? " p4" : logprob < -1 ? " p3" : logprob < -0.3 ? " p2" : " p1";
    if (marks.drift.has(i)) className += " drift";
    if (marks.flagged.has(i)) className += " flagged";
    if (marks.old.has(i)) className += " old";
    if (i === state.token) className += " picked";
    const same = equalRunLength(detail, marks, i, end);
    const element = make("span", className, tokenLabel(detail, detail.ids[i]) + (same > 1 ? ` × ${same}` : ""));
    element.dataset.i = i;
    elements.push(element);
    i += same - 1;
    if (marks.replacement.has(i)) elements.push(make("span", "replacement", "→ " + marks.replacement.get(i).map((id) => tokenLabel(detail, id).trim() || "␠").join("|")));
  }
  return elements;
}

// Return how many equal tokens to show as one: an image is hundreds of equal context tokens.
function equalRunLength(detail, marks, i, end) {
  if (detail.kindOf[i] !== "context" && detail.kindOf[i] !== "prompt") return 1;
  let to = i + 1;
  while (to < end && detail.ids[to] === detail.ids[i] && detail.kindOf[to] === detail.kindOf[i] && !marks.flagged.has(to) && to !== state.token) to += 1;
  return to - i > MAX_EQUAL_SHOWN ? to - i : 1;
}

function tokenLabel(detail, id) {
  const bytes = detail.bytes.get(id);
  if (bytes === undefined) return `⟨${id}⟩`;
  if (!bytes.length) return "∅";
  try {
    return visibleWhitespace(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  } catch {
    return "⟨" + hex(bytes) + "⟩";
  }
}

function visibleWhitespace(text) {
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
  if (span) lines.push(`turn ${span[0] + 1}   weights ${span[3] ?? "unknown"}`);
  for (const [start, end, ids] of detail.drift || []) {
    if (start <= i && i < end) lines.push(`re-encoded as: ${ids.map((other) => `${other} ${JSON.stringify(tokenLabel(detail, other))}`).join(", ") || "nothing"}`);
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
