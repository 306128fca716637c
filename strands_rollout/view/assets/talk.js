// A sample as a conversation: the prompt, each turn with its calls and results, and other context.

const FOLDED_CHARS = 1500;
const CUT = new Set(["turn_length", "response_length", "context_length", "aborted", "episode_timeout"]);
const ONLY_MARKUP = /^(?:<\|[^|<>]*\|>|<\/?[a-z_]+>|<｜[^｜<>]*｜>|\[\/?[A-Z_]+\]|## Return of \S*|\b(?:user|tool|system|assistant|ipython|observation|think)\b|\s)*$/;

function talkView(detail, target) {
  for (const message of messagesOf(detail.messages)) target.append(message);
  if (!detail.ids.length || !detail.bytes.size) {
    const response = makeCard("turn", ["response"]);
    const text = detail.response.replace(LAST_CONTROL, "") || "(no text in this dump; open it with --tokenizer)";
    // without token texts, calls and results can't be told apart: a response with control tokens or calls is shown raw
    const isProse = !/<\|[^|<>\s]{1,60}\|>|<tool_call>/.test(text);
    const thought = isProse ? /^\s*(?:<think>)?([^]*)<\/think>/.exec(text) : null;
    if (thought) response.append(thoughtBox(thought[1]));
    appendText(response, thought ? text.slice(thought[0].length) : text, isProse);
    target.append(response);
    return;
  }
  const marks = tokenMarks(detail);
  const pieces = sectionsOf(detail).map((section) => ({ section, text: textOf(detail, section.start, section.end), parts: detail.talkAt.get(section.start) || null }));
  const results = new Map();
  for (const { text, parts } of pieces) {
    for (const part of parts || []) if (part[0] === "result" && part[3] !== null) results.set(part[3], text.slice(part[1], part[2]));
  }
  for (const { section, text, parts } of pieces) {
    if (section.kind === "prompt") target.append(collapsible(`prompt as the policy read it, ${section.end} tokens`, text));
    else if (section.turn) target.append(turnCard(detail, marks, section, text, parts, results));
    else target.append(contextCard(detail, marks, section, text, parts || []));
  }
}

function messagesOf(prompt) {
  const messages = Array.isArray(prompt) ? prompt : prompt ? [{ role: "prompt", content: prompt }] : [];
  return messages.map((message) => {
    const content = contentOf(message);
    const role = String((message && message.role) || "message");
    if (role === "system" || content.length > FOLDED_CHARS) return collapsible(role, content, "", true);
    const shown = makeCard("", [role]);
    appendText(shown, content, true);
    return shown;
  });
}

// Return the text of a message's parts, with images as their type.
function contentOf(message) {
  const content = message && message.content !== undefined ? message.content : message;
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return JSON.stringify(content, null, 1);
  return content.map((part) => {
    if (typeof part === "string") return part;
    if (part && typeof part.text === "string") return part.text;
    const kind = part && (part.type || ["image", "image_url", "video", "audio"].find((name) => name in part));
    return kind ? `[${String(kind).replace("_url", "")}]` : JSON.stringify(part, null, 1);
  }).join("\n");
}

function cardWithBadges(detail, marks, section, className, facts) {
  const element = makeCard(className, facts);
  const head = element.firstChild;
  const seek = (i, label, tone) => head.append(button("badge " + tone, label, () => openToken(i)));
  const drifted = [...marks.drift.keys()].filter((i) => section.start <= i && i < section.end);
  if (drifted.length) seek(drifted[0], `drift ${drifted.length}`, "drifted");
  const first = new Map();
  for (const [name, , start] of detail.problems) if (start !== null && section.start <= start && start < section.end && !first.has(name)) first.set(name, start);
  for (const [name, start] of first) seek(start, name, problemTone(name));
  return element;
}

function turnCard(detail, marks, section, text, parts, results) {
  const { turn, versions } = section.turn;
  const kinds = [...new Set(detail.kindOf.slice(section.start, section.end))];
  const dropped = kinds.filter((kind) => kind !== "trained");
  const facts = [`turn ${turn + 1}`, `${section.end - section.start} tokens`];
  if (versions.some((version) => version !== null)) facts.push("weights " + versions.join(" → "));
  if (dropped.length) facts.push((kinds.length > 1 ? "partly " : "") + (dropped[0] === "context" ? "not trained" : "dropped: " + dropped.join(", ")));
  const element = cardWithBadges(detail, marks, section, !dropped.length ? "turn" : dropped.includes("stale") ? "stale" : "dropped", facts);
  element.dataset.turn = turn;
  const isCut = turn === detail.turns.length - 1 && CUT.has(detail.facts && detail.facts.stop_reason);
  const callById = new Map(callsOf(detail, turn).map((call) => [String(call.id), call]));
  if (!parts) appendText(element, text, true);
  for (const part of parts || []) {
    const [kind] = part;
    if (kind === "text") appendText(element, text.slice(part[1], part[2]), true);
    else if (kind === "think") element.append(thoughtBox(text.slice(part[1], part[2])));
    else if (kind === "call") element.append(callBox(part[2], part[3], outcomeOf(detail, callById, part[1]), results.get(part[1])));
    else if (kind === "malformed") element.append(malformedBox(text.slice(part[1], part[2]), isCut ? "the turn was cut off here" : part[5], results.get(part[3]), isCut));
    callById.delete(kind === "call" ? part[1] : "");
  }
  for (const call of callById.values()) element.append(make("div", "outcome " + tone(call), `${describeCall(call)}, ${seconds(call.s)}`));
  return element;
}

function outcomeOf(detail, callById, id) {
  const call = callById.get(id);
  if (call) return { tone: tone(call), words: `${describeCall(call)}, ${seconds(call.s)}` };
  const hasRecords = detail.facts && Array.isArray(detail.facts.calls) && !(detail.facts.segments > 1);
  return hasRecords ? { tone: "wrong", words: "not run" } : null;
}

function tone(call) { return call.status === "success" ? "dim" : "wrong"; }

function callBox(name, args, outcome, output) {
  const box = make("div", "call", "", make("b", "", "calls " + name));
  for (const [key, value] of Object.entries(args)) box.append(make("div", "dim", key), state.isPlain && typeof value === "string" ? make("pre", "", value) : argumentBlock(key, value));
  if (outcome) box.append(make("div", "outcome " + outcome.tone, outcome.words));
  if (output !== undefined) box.append(resultBox(output));
  return box;
}

function malformedBox(text, reason, output, isCut) {
  const box = make("div", "call", "", make("b", isCut ? "dim" : "wrong", isCut ? "unfinished call" : "malformed call"), make("div", isCut ? "dim" : "wrong", reason), make("pre", "", text.trim()));
  if (output !== undefined) box.append(resultBox(output));
  return box;
}

function resultBox(text) {
  const box = make("div", "output", "", make("div", "dim", text.trim() ? "output, read as context" : "no output"));
  appendText(box, text);
  return box;
}

// Draw a context: results that belong to no known call, other text, and the whole context folded away.
function contextCard(detail, marks, section, text, parts) {
  const element = cardWithBadges(detail, marks, section, "context", ["context", `${section.end - section.start} tokens`]);
  let at = 0;
  const rest = (piece) => { if (!ONLY_MARKUP.test(piece)) appendText(element, piece); };
  for (const [, start, end, call] of parts) {
    rest(text.slice(at, start));
    if (call === null) element.append(resultBox(text.slice(start, end)));
    at = end;
  }
  rest(text.slice(at));
  element.append(collapsible("as the policy read it", text));
  return element;
}

// Append a text: control tokens as chips, with one chip for repeated tokens; other text as Markdown or raw.
function appendText(target, text, isProse = false) {
  if (!text.trim()) return;
  const isRendered = isProse && !state.isPlain;
  const pre = make(isRendered ? "div" : "pre", isRendered ? "prose" : "");
  for (const piece of text.replace(/^\n+|\n+$/g, "").split(/((?:<\|[^|<>\s]{1,60}\|>)+)/)) {
    if (!piece) continue;
    if (!(piece.startsWith("<|") && piece.endsWith("|>"))) { pre.append(isRendered ? renderMarkdown(piece) : visible(piece)); continue; }
    for (const [chip, count] of collapseRepeats(piece.match(/<\|[^|<>\s]+\|>/g) || [piece])) pre.append(make("span", "control", count > 1 ? `${chip} × ${count}` : chip));
  }
  target.append(pre);
}

function collapseRepeats(items) {
  const found = [];
  for (const item of items) {
    const last = found[found.length - 1];
    if (last && last[0] === item) last[1] += 1; else found.push([item, 1]);
  }
  return found;
}

function thoughtBox(text) {
  const words = text.trim().split(/\s+/).filter(Boolean).length;
  return collapsible(words ? `thought, ${words} word${words === 1 ? "" : "s"}` : "empty thought", text.trim(), "think", true);
}

function makeCard(className, facts, ...children) {
  return make("div", "card " + className, "", make("header", "", "", ...facts.map((fact) => make("span", "", fact))), ...children);
}

function collapsible(title, text, className = "", isProse = false) {
  const element = make("details", className, "", make("summary", "", title));
  element.addEventListener("toggle", () => { if (element.open && element.childElementCount === 1) { const pre = make("pre"); appendText(pre, text, isProse); element.append(pre.firstChild || pre); } });
  return element;
}
