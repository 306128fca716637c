// A sample as a conversation: what was asked, each turn, what came back.

const PARTS = [
  ["think", /<think>([\s\S]*?)(<\/think>|$)/g],
  ["call", /<tool_call>([\s\S]*?)(<\/tool_call>|$)/g],
  ["call", /<\|tool_calls?(?:_section)?_begin\|>([\s\S]*?)(<\|tool_calls?(?:_section)?_end\|>|$)/g],
  ["call", /(?:\[TOOL_CALLS\]|<\|python_tag\|>)([\s\S]*)()$/g],
  ["result", /<tool_response>\n?([\s\S]*?)(\n?<\/tool_response>|$)/g],
];
const FOLDED_CHARS = 1500;

function talkView(detail, target) {
  for (const message of messagesOf(detail.messages)) target.append(message);
  if (!detail.ids.length || !detail.bytes.size) {
    target.append(card("turn", ["response"], make("pre", "", detail.response || "(no text in this dump; open it with --tokenizer)")));
    return;
  }
  const marks = tokenMarks(detail);
  for (const stretch of stretches(detail)) {
    const text = textOf(detail, stretch.start, stretch.end);
    if (stretch.kind === "prompt") target.append(folded(`the prompt as the policy read it, ${stretch.end} tokens`, text));
    else target.append(stretchCard(detail, marks, stretch, text));
  }
}

function messagesOf(prompt) {
  const messages = Array.isArray(prompt) ? prompt : prompt ? [{ role: "prompt", content: prompt }] : [];
  return messages.map((message) => {
    const content = message && typeof message.content === "string" ? message.content : JSON.stringify(message && message.content !== undefined ? message.content : message, null, 1);
    const role = String((message && message.role) || "message");
    if (role === "system" || content.length > FOLDED_CHARS) return folded(role, content);
    return card("", [role], make("pre", "", content));
  });
}

function stretchCard(detail, marks, stretch, text) {
  const size = stretch.end - stretch.start;
  const kind = detail.kindOf[stretch.start];
  const facts = stretch.turn ? [`turn ${stretch.turn.turn + 1}`, `${size} tokens`] : ["context", `${size} tokens`];
  if (stretch.turn && stretch.turn.versions.some((v) => v !== null)) facts.push("weights " + stretch.turn.versions.join(", "));
  if (stretch.turn && kind !== "trained") facts.push(kind === "context" ? "not trained" : "dropped: " + kind);
  const className = stretch.turn ? (kind === "trained" ? "turn" : kind === "stale" ? "stale" : "dropped") : "context";
  const element = card(className, facts);
  const head = element.firstChild;
  const seek = (i, label, tone) => head.append(button("badge " + tone, label, () => openToken(i)));
  const drifted = [...marks.drift.keys()].filter((i) => stretch.start <= i && i < stretch.end);
  if (drifted.length) seek(drifted[0], `drift ${drifted.length}`, "drifted");
  for (const [name, , start] of detail.problems) if (start !== null && stretch.start <= start && start < stretch.end) { seek(start, name, "problem"); }
  for (const extra of [...head.querySelectorAll(".badge")].slice(4)) extra.remove();
  appendParts(element, text, stretch.turn !== null);
  if (stretch.turn) for (const made of callsOf(detail, stretch.turn.turn)) element.append(make("div", `made ${made.status === "success" ? "dim" : "wrong"}`, `${callWords(made)}, ${seconds(made.s)}`));
  return element;
}

function appendParts(target, text, isTurn) {
  let at = 0;
  const lead = isTurn ? text.indexOf("</think>") : -1;
  const opens = text.indexOf("<think>");
  if (lead >= 0 && (opens < 0 || opens > lead)) { target.append(think(text.slice(0, lead))); at = lead + 8; }
  for (const found of foundParts(text).filter((part) => part.start >= at)) {
    if (found.start < at) continue;
    appendText(target, text.slice(at, found.start));
    target.append(found.kind === "think" ? think(found.inside) : found.kind === "call" ? call(found.inside) : result(found.inside));
    at = found.end;
  }
  appendText(target, text.slice(at));
}

function foundParts(text) {
  const found = [];
  for (const [kind, pattern] of PARTS) {
    for (const match of text.matchAll(pattern)) found.push({ kind, start: match.index, end: match.index + match[0].length, inside: match[1] });
  }
  found.sort((a, b) => a.start - b.start || b.end - a.end);
  const outer = [];
  for (const part of found) if (!outer.length || part.start >= outer[outer.length - 1].end) outer.push(part);
  return outer;
}

// control tokens as chips, the rest as it is
function appendText(target, text) {
  if (!text.trim()) return;
  const pre = make("pre");
  for (const piece of text.replace(/^\n+|\n+$/g, "").split(/(<\|[^|<>\s]{1,60}\|>)/)) {
    if (piece) pre.append(piece.startsWith("<|") && piece.endsWith("|>") ? make("span", "control", piece) : visible(piece));
  }
  target.append(pre);
}

function think(text) {
  const words = text.trim().split(/\s+/).filter(Boolean).length;
  return folded(words ? `thought, ${words} word${words === 1 ? "" : "s"}` : "thought nothing", text.trim(), "think");
}

function call(text) {
  const box = make("div", "call");
  let asked = null;
  try { asked = JSON.parse(text); } catch { /* shown as it is */ }
  if (asked === null || typeof asked !== "object" || typeof asked.name !== "string") {
    box.append(make("b", "wrong", "call in another form, or malformed"), make("pre", "", text.trim()));
    return box;
  }
  box.append(make("b", "", "calls " + asked.name));
  const given = asked.arguments ?? asked.parameters ?? {};
  for (const [name, value] of Object.entries(typeof given === "object" && given !== null ? given : { arguments: given })) {
    box.append(make("div", "dim", name), make("pre", "", typeof value === "string" ? value : JSON.stringify(value, null, 1)));
  }
  return box;
}

function result(text) {
  const box = make("div", "call", "", make("b", "", "result"));
  box.append(make("pre", "", text));
  return box;
}

function card(className, facts, ...children) {
  return make("div", "card " + className, "", make("header", "", "", ...facts.map((fact) => make("span", "", fact))), ...children);
}

function folded(title, text, className = "") {
  const element = make("details", className, "", make("summary", "", title));
  element.addEventListener("toggle", () => { if (element.open && element.childElementCount === 1) element.append(make("pre", "", text)); });
  return element;
}
