"use strict";
// The page's state, its data and helpers for elements. Rows come with the page or from the server; the details of a
// sample are read when it is opened. Text of a dump is never parsed as HTML.

const state = { rows: [], shown: [], title: "", live: false, picked: null, view: "talk", token: null, onlyProblems: false,
  runs: [], parts: new Set(), ofAnyStep: [], pane: "overview", place: null, metric: null, isPlain: false };
const detailCache = new Map();
const MAX_DEPTH = 60;

function byId(id) { return document.getElementById(id); }

function make(tag, className, text, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined && text !== null && text !== "") element.textContent = visible(String(text));
  element.append(...children);
  return element;
}

// Make control and bidirectional characters visible, except line ends and tabs.
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, (c) => {
    const code = c.charCodeAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : "\\u" + code.toString(16).padStart(4, "0");
  });
}

// Return whether a tree of nodes with `children` is too deep: browsers lay out nested elements recursively.
function isTooDeep(root) {
  let level = [root];
  for (let depth = 0; depth < MAX_DEPTH; depth += 1) level = level.flatMap(({ children = [] }) => [...children]);
  return level.length > 0;
}

// An entry of a legend: a color and its meaning, without a line break between them.
function legendItem(className, text) { return make("span", "keyed", "", make("span", "key " + className), visible(text)); }

function button(className, text, act) {
  const element = make("button", className, text);
  element.type = "button";
  element.addEventListener("click", act);
  return element;
}

function timed(name, work) {
  const start = performance.now();
  work();
  void document.body.offsetHeight; // forces the layout, which is part of the measured time
  performance.measure(name, { start });
}

// Return the element with a sample's details; null on a live page. Details follow the script, so that a large page is
// usable while it loads; an element with a next sibling has loaded completely.
async function embeddedDetail(position) {
  if (state.live) return null;
  for (;;) {
    const element = byId("d" + position);
    if (element && (element.nextElementSibling || document.readyState !== "loading")) return element;
    if (document.readyState !== "loading") throw new Error("the page's file is incomplete; create it again");
    await new Promise((next) => setTimeout(next, 50));
  }
}

function showLoading(done, all) {
  const bar = byId("loading");
  bar.hidden = done === all;
  if (all) { bar.max = all; bar.value = done; } else bar.removeAttribute("value");
}

// Show how many details have loaded, until the page is complete.
function trackPageLoad(seen = 0) {
  let now = seen;
  while (byId("d" + now)) now += 1;
  const isLoaded = document.readyState !== "loading";
  showLoading(isLoaded ? state.rows.length : now, state.rows.length);
  if (!isLoaded) setTimeout(() => trackPageLoad(now), 100);
}

async function readDetail(position) {
  if (detailCache.has(position)) return detailCache.get(position);
  const element = await embeddedDetail(position);
  const packed = element ? Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0))
    : new Uint8Array(await (await fetch("sample/" + position)).arrayBuffer());
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const detail = indexDetail(JSON.parse(await new Response(stream).text()));
  if (detailCache.size > 20) detailCache.delete(detailCache.keys().next().value);
  detailCache.set(position, detail);
  return detail;
}

// Add the values that views look up: bytes by token id, kind and mask by position, turns.
function indexDetail(detail) {
  const encoder = new TextEncoder();
  detail.bytes = new Map();
  for (const [id, text] of Object.entries(detail.texts)) {
    detail.bytes.set(Number(id), typeof text === "string" ? encoder.encode(text) : Uint8Array.from(text));
  }
  detail.kindOf = expandRuns(detail.kinds, detail.ids.length, 0);
  detail.maskOf = expandRuns(detail.mask, detail.ids.length, detail.prompt);
  detail.talkAt = new Map(detail.talk);
  detail.turns = [];
  for (const [turn, start, end, version] of detail.spans) {
    const last = detail.turns[detail.turns.length - 1];
    if (last && last.turn === turn) { last.end = end; if (!last.versions.includes(version)) last.versions.push(version); }
    else detail.turns.push({ turn, start, end, versions: [version] });
  }
  return detail;
}

// Return an array of `length` from runs [value, start, end].
function expandRuns(runs, length, offset) {
  const values = new Array(length);
  for (const [value, start, end] of runs) values.fill(value, start + offset, end + offset);
  return values;
}

function textOf(detail, start, end) {
  const parts = detail.ids.slice(start, end).map((id) => detail.bytes.get(id) || new TextEncoder().encode("⟨" + id + "⟩"));
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) { whole.set(part, at); at += part.length; }
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(whole);
}

// Return the prompt, the turns and the contexts between them, in order; together they cover all tokens.
function sectionsOf(detail) {
  const found = [];
  const add = (kind, start, end, turn) => { if (end > start) found.push({ kind, start, end, turn }); };
  add("prompt", 0, detail.prompt, null);
  let at = detail.prompt;
  for (const turn of detail.turns) {
    if (turn.start < at) continue;
    add("context", at, turn.start, null);
    add("turn", turn.start, turn.end, turn);
    at = turn.end;
  }
  add("context", at, detail.ids.length, null);
  return found;
}

function groupBy(items, keyOf) {
  const groups = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (groups.has(key)) groups.get(key).push(item); else groups.set(key, [item]);
  }
  return groups;
}

function number(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) ? String(value) : value.toFixed(digits);
}
