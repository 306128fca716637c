// A sample as a conversation: the prompt, each turn with its calls and results, and other context.

const FOLDED_CHARS = 1500;
const CUT = new Set(["turn_length", "response_length", "context_length", "aborted", "episode_timeout"]);
const ONLY_MARKUP = /^(?:<\|[^|<>]*\|>|<\/?[a-z_]+>|<｜[^｜<>]*｜>|\[\/?[A-Z_]+\]|## Return of \S*|\b(?:user|tool|system|assistant|ipython|observation|think)\b|\s)*$/;

function talkView(detail, target) {
  for (const message of messagesOf(detail.messages)) target.append(message);
  if (!detail.ids.length || !detail.bytes.size) {
    const response = card("turn", ["response"]);
    const text = detail.response.replace(LAST_CONTROL, "") || "(no text in this dump; open it with --tokenizer)";
    // without token texts, calls and results are part of the response, which is then shown raw
    const isProse = !/<\|[^|<>\s]{1,60}\|>|<tool_call>/.test(text);
    const thought = isProse ? /^\s*(?:<think>)?([^]*)<\/think>/.exec(text) : null;
    if (thought) response.append(think(thought[1]));
    appendText(response, thought ? text.slice(thought[0].length) : text, isProse);
    target.append(response);
    return;
  }
  const marks = tokenMarks(detail);
  const pieces = stretches(detail).map((stretch) => ({ stretch, text: textOf(detail, stretch.start, stretch.end), parts: detail.talkAt.get(stretch.start) || null }));
  const results = new Map();
  for (const { text, parts } of pieces) {
    for (const part of parts || []) if (part[0] === "result" && part[3] !== null) results.set(part[3], text.slice(part[1], part[2]));
  }
  for (const { stretch, text, parts } of pieces) {
    if (stretch.kind === "prompt") target.append(folded(`the prompt as the policy read it, ${stretch.end} tokens`, text));
    else if (stretch.turn) target.append(turnCard(detail, marks, stretch, text, parts, results));
    else target.append(contextCard(detail, marks, stretch, text, parts || []));
  }
}

function messagesOf(prompt) {
  const messages = Array.isArray(prompt) ? prompt : prompt ? [{ role: "prompt", content: prompt }] : [];
  return messages.map((message) => {
    const content = contentOf(message);
    const role = String((message && message.role) || "message");
    if (role === "system" || content.length > FOLDED_CHARS) return folded(role, content, "", true);
    const shown = card("", [role]);
    appendText(shown, content, true);
    return shown;
  });
}

// texts of a message's parts; images by their type
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

function headed(detail, marks, stretch, className, facts) {
  const element = card(className, facts);
  const head = element.firstChild;
  const seek = (i, label, tone) => head.append(button("badge " + tone, label, () => openToken(i)));
  const drifted = [...marks.drift.keys()].filter((i) => stretch.start <= i && i < stretch.end);
  if (drifted.length) seek(drifted[0], `drift ${drifted.length}`, "drifted");
  const first = new Map();
  for (const [name, , start] of detail.problems) if (start !== null && stretch.start <= start && start < stretch.end && !first.has(name)) first.set(name, start);
  for (const [name, start] of first) seek(start, name, problemTone(name));
  return element;
}

function turnCard(detail, marks, stretch, text, parts, results) {
  const { turn, versions } = stretch.turn;
  const kinds = [...new Set(detail.kindOf.slice(stretch.start, stretch.end))];
  const dropped = kinds.filter((kind) => kind !== "trained");
  const facts = [`turn ${turn + 1}`, `${stretch.end - stretch.start} tokens`];
  if (versions.some((version) => version !== null)) facts.push("weights " + versions.join(" → "));
  if (dropped.length) facts.push((kinds.length > 1 ? "partly " : "") + (dropped[0] === "context" ? "not trained" : "dropped: " + dropped.join(", ")));
  const element = headed(detail, marks, stretch, !dropped.length ? "turn" : dropped.includes("stale") ? "stale" : "dropped", facts);
  element.dataset.turn = turn;
  const isCut = turn === detail.turns.length - 1 && CUT.has(detail.facts && detail.facts.stop_reason);
  const made = new Map(callsOf(detail, turn).map((call) => [String(call.id), call]));
  if (!parts) appendText(element, text, true);
  for (const part of parts || []) {
    const [kind] = part;
    if (kind === "text") appendText(element, text.slice(part[1], part[2]), true);
    else if (kind === "think") element.append(think(text.slice(part[1], part[2])));
    else if (kind === "call") element.append(callBox(part[2], part[3], outcomeOf(detail, made, part[1]), results.get(part[1])));
    else if (kind === "malformed") element.append(malformedBox(text.slice(part[1], part[2]), isCut ? "the turn was cut here" : part[5], results.get(part[3]), isCut));
    made.delete(kind === "call" ? part[1] : "");
  }
  for (const call of made.values()) element.append(make("div", "made " + tone(call), `${callWords(call)}, ${seconds(call.s)}`));
  return element;
}

function outcomeOf(detail, made, id) {
  const call = made.get(id);
  if (call) return { tone: tone(call), words: `${callWords(call)}, ${seconds(call.s)}` };
  const isTold = detail.facts && Array.isArray(detail.facts.calls) && !(detail.facts.segments > 1);
  return isTold ? { tone: "wrong", words: "not run" } : null;
}

function tone(call) { return call.status === "success" ? "dim" : "wrong"; }

function callBox(name, given, outcome, output) {
  const box = make("div", "call", "", make("b", "", "calls " + name));
  for (const [key, value] of Object.entries(given)) box.append(make("div", "dim", key), state.isPlain && typeof value === "string" ? make("pre", "", value) : givenBlock(key, value));
  if (outcome) box.append(make("div", "made " + outcome.tone, outcome.words));
  if (output !== undefined) box.append(resultBox(output));
  return box;
}

function malformedBox(text, reason, output, isCut) {
  const box = make("div", "call", "", make("b", isCut ? "dim" : "wrong", isCut ? "a call that was not finished" : "malformed call"), make("div", isCut ? "dim" : "wrong", reason), make("pre", "", text.trim()));
  if (output !== undefined) box.append(resultBox(output));
  return box;
}

function resultBox(text) {
  const box = make("div", "output", "", make("div", "dim", text.trim() ? "output, read as context" : "output: nothing"));
  appendText(box, text);
  return box;
}

// Context that is not the result of a call; folded if it is only markup.
function contextCard(detail, marks, stretch, text, parts) {
  const element = headed(detail, marks, stretch, "context", ["context", `${stretch.end - stretch.start} tokens`]);
  let at = 0;
  const rest = (piece) => { if (!ONLY_MARKUP.test(piece)) appendText(element, piece); };
  for (const [, start, end, call] of parts) {
    rest(text.slice(at, start));
    if (call === null) element.append(resultBox(text.slice(start, end)));
    at = end;
  }
  rest(text.slice(at));
  element.append(folded("as the policy read it", text));
  return element;
}

// control tokens as chips, repeated ones as a single chip; other text as Markdown or raw
function appendText(target, text, isProse = false) {
  if (!text.trim()) return;
  const isRendered = isProse && !state.isPlain;
  const pre = make(isRendered ? "div" : "pre", isRendered ? "prose" : "");
  for (const piece of text.replace(/^\n+|\n+$/g, "").split(/((?:<\|[^|<>\s]{1,60}\|>)+)/)) {
    if (!piece) continue;
    if (!(piece.startsWith("<|") && piece.endsWith("|>"))) { pre.append(isRendered ? rendered(piece) : visible(piece)); continue; }
    for (const [chip, count] of alike(piece.match(/<\|[^|<>\s]+\|>/g) || [piece])) pre.append(make("span", "control", count > 1 ? `${chip} × ${count}` : chip));
  }
  target.append(pre);
}

function alike(items) {
  const found = [];
  for (const item of items) {
    const last = found[found.length - 1];
    if (last && last[0] === item) last[1] += 1; else found.push([item, 1]);
  }
  return found;
}

function think(text) {
  const words = text.trim().split(/\s+/).filter(Boolean).length;
  return folded(words ? `thought, ${words} word${words === 1 ? "" : "s"}` : "thought nothing", text.trim(), "think", true);
}

function card(className, facts, ...children) {
  return make("div", "card " + className, "", make("header", "", "", ...facts.map((fact) => make("span", "", fact))), ...children);
}

function folded(title, text, className = "", isProse = false) {
  const element = make("details", className, "", make("summary", "", title));
  element.addEventListener("toggle", () => { if (element.open && element.childElementCount === 1) { const pre = make("pre"); appendText(pre, text, isProse); element.append(pre.firstChild || pre); } });
  return element;
}
