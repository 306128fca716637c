// Start of the page, keys, permalinks, theme, and new samples of a running job.

const KEYS = [["o", "overview of the run"], ["j / k", "next, previous sample"], ["Enter", "open"], ["Esc", "back to the list"], ["/", "filter"], ["t", "conversation or tokens"], ["m", "conversation as Markdown or raw"],
  ["f", "facts"], ["n", "next marked token"], ["← / →", "previous, next token, with its details"], ["p", "only samples with problems"], ["g", "groups, or runs, side by side"], ["d", "light or dark"], ["?", "these keys"]];
const POLL_MS = 2000;

function writeHash() {
  const parts = new URLSearchParams();
  if (state.pane === "groups") parts.set("groups", "1");
  else if (state.pane === "sample" && state.picked !== null && document.body.classList.contains("opened")) {
    parts.set("sample", state.picked);
    parts.set("view", state.view);
    if (state.token !== null) parts.set("token", state.token);
  }
  for (const id of CONTROLS) if (byId(id).value) parts.set(id, byId(id).value);
  if (state.onlyProblems) parts.set("problems", "1");
  // opening another pane adds a history entry, and the old entry keeps its scroll position; the list counts as a pane
  // on a phone, which shows either the list or a pane
  const place = byId("sample").offsetParent ? state.pane : "list";
  const here = { list: place === "list" };
  if (state.place && state.place !== place) {
    history.replaceState({ ...history.state, top: byId("sample").scrollTop }, "");
    history.pushState(here, "", "#" + parts);
  } else history.replaceState(here, "", "#" + parts);
  state.place = place;
  for (const id of ["overview", "groups"]) byId(id).setAttribute("aria-pressed", String(place === id));
}

function readHash() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const { top = 0, list = false } = history.state || {};
  state.place = null;
  byId("tip").hidden = true;
  for (const id of CONTROLS) byId(id).value = parts.get(id) || "";
  setOnlyProblems(parts.get("problems") === "1");
  timed("filter", applyFilters);
  if (!state.rows.length) { drawOverview(); return; } // `poll` reads the hash again when samples arrive
  if (parts.get("groups")) { showGroups(); byId("sample").scrollTop = top; return; }
  const position = parts.has("sample") ? Number(parts.get("sample")) : null;
  if (position === null || !state.rows[position]) {
    // with a single sample, open it instead of the overview
    if (state.rows.length === 1) { void openSample(0, { view: "talk" }); return; }
    state.pane = "overview";
    document.body.classList.toggle("opened", !list);
    drawRows();
    writeHash();
    requestAnimationFrame(() => setTimeout(() => { drawRun(); byId("sample").scrollTop = top; })); // paint the list first
    return;
  }
  const view = VIEWS.some(([name]) => name === parts.get("view")) ? parts.get("view") : "talk";
  void openSample(position, { view, token: parts.has("token") ? Number(parts.get("token")) : null });
}

function filtersChanged() {
  timed("filter", () => { byId("viewport").scrollTop = 0; applyFilters(); });
  drawRun();
  writeHash();
}

// Redraw the overview or the groups.
function drawRun() {
  if (state.pane === "groups") timed("groups", drawGroups);
  else if (state.pane === "overview") timed("overview", drawOverview);
}

function setOnlyProblems(only) {
  state.onlyProblems = only;
  byId("problems-only").setAttribute("aria-pressed", String(only));
}

function toggleProblems() { setOnlyProblems(!state.onlyProblems); filtersChanged(); }

function closeSample() {
  if (byId("keys").open) { byId("keys").close(); return; }
  Object.assign(state, { token: null, pane: "overview" });
  byId("tip").hidden = true;
  document.body.classList.remove("opened"); // a phone shows the list
  writeHash();
  timed("overview", drawOverview);
  byId("sample").scrollTop = 0;
  drawRows();
  byId("viewport").focus({ preventScroll: true });
}

function showGroups() {
  state.pane = "groups";
  document.body.classList.add("opened");
  writeHash();
  timed("groups", drawGroups);
  byId("sample").scrollTop = 0;
}

function step(by) {
  const place = state.shown.indexOf(state.picked);
  const next = place < 0 ? (by > 0 ? 0 : state.shown.length - 1) : Math.min(Math.max(place + by, 0), state.shown.length - 1);
  if (state.shown[next] === undefined) return;
  if (document.body.classList.contains("opened") && state.pane === "sample") { void openSample(state.shown[next]); return; }
  state.picked = state.shown[next];
  scrollToPicked();
  drawRows();
}

function nextMarked() {
  const marked = [...document.querySelectorAll(".t.flagged[data-i], .t.drift[data-i], .t.old[data-i]")];
  const after = marked.find((t) => Number(t.dataset.i) > (state.token ?? -1)) || marked[0];
  if (!after) return;
  for (const other of document.querySelectorAll(".t.picked")) other.classList.remove("picked");
  after.classList.add("picked");
  after.scrollIntoView({ block: "center" });
  state.token = Number(after.dataset.i);
  writeHash();
}

function stepToken(by) {
  if (state.view !== "tokens" || !document.body.classList.contains("opened")) return;
  const all = [...document.querySelectorAll("#sample .block .t[data-i]")];
  const at = all.findIndex((t) => Number(t.dataset.i) === state.token);
  const next = at < 0 ? all.find((t) => t.classList.contains("trained")) || all[0] : all[Math.min(Math.max(at + by, 0), all.length - 1)];
  const detail = detailCache.get(state.picked);
  if (!next || !detail) return;
  next.scrollIntoView({ block: "nearest" });
  pickToken(detail, next);
}

function showKeys() {
  const dialog = byId("keys");
  dialog.replaceChildren(make("h2", "", "keys"), ...KEYS.map(([key, text]) => make("p", "", "", make("kbd", "", key), make("span", "", text))),
    make("p", "dim", "filter by numbers: " + Object.keys(FIELDS).join(", ") + " with < > <= >= =; by words: " + Object.keys(TEXT_FIELDS).join(", ") + " with =; text in \"quotes\" is searched as it is"), button("", "close", () => dialog.close()));
  dialog.showModal();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

function toggleTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  setTheme(theme);
  try { localStorage.setItem("theme", theme); } catch { /* a page from a file may have no storage */ }
}

function initTheme() {
  let stored = null;
  try { stored = localStorage.getItem("theme"); } catch { /* no storage, as in toggleTheme */ }
  const prefers = matchMedia("(prefers-color-scheme: dark)");
  setTheme(stored || (prefers.matches ? "dark" : "light"));
  prefers.addEventListener("change", () => { if (!stored) setTheme(prefers.matches ? "dark" : "light"); });
}

const ON_KEY = {
  j: () => step(1), k: () => step(-1), ArrowLeft: () => stepToken(-1), ArrowRight: () => stepToken(1), "/": () => byId("query").focus(), "?": showKeys, g: showGroups, d: toggleTheme, p: toggleProblems, n: nextMarked,
  o: showOverview, m: togglePlain, Enter: () => openPicked({}), Escape: closeSample,
  t: () => openPicked({ view: state.view === "tokens" ? "talk" : "tokens" }), f: () => openPicked({ view: "facts" }),
};

// Open the picked sample; if none was picked, the most notable one.
function openPicked(options) {
  const [first] = notableSamples(state.shown.map((position) => state.rows[position]));
  const position = state.picked ?? (first ? first[1].position : null);
  if (position !== null) void openSample(position, options);
}

function togglePlain() {
  state.isPlain = !state.isPlain;
  if (state.pane === "sample") openPicked({ view: "talk" });
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = event.target.matches("input, select, textarea");
  if (isTyping) {
    if (event.key === "Escape" || (event.key === "Enter" && event.target.id === "query")) { event.target.blur(); event.preventDefault(); }
    return;
  }
  if (event.key === "Enter" && event.target.matches("button, summary")) return;
  if (event.target.id === "viewport" && (event.key === "ArrowDown" || event.key === "ArrowUp")) { event.preventDefault(); step(event.key === "ArrowDown" ? 1 : -1); return; }
  const action = ON_KEY[event.key];
  if (action && !(byId("keys").open && event.key !== "Escape")) { event.preventDefault(); action(); }
}

function loadIndex(index) {
  Object.assign(state, { rows: index.rows, title: index.title, live: index.live, runs: index.runs });
  state.rows.forEach((row, position) => { row.position = position; });
  addRewardParts();
  document.title = index.title;
  byId("title").textContent = index.title;
  if (index.runs.length) byId("groups").textContent = "questions";
  byId("title").title = index.title;
  fillFilters();
}

async function poll(tag) {
  let next = tag;
  const waiting = tag === null ? setInterval(() => void showReading(), 300) : 0;
  try {
    const answer = await fetch("index.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (answer.ok) {
      next = answer.headers.get("ETag");
      const before = identity(state.rows[state.picked]);
      loadIndex(await answer.json());
      detailCache.clear();
      if (tag === null) readHash(); else { applyFilters(); drawRun(); }
      const isReplaced = before !== null && before !== identity(state.rows[state.picked]);
      if (isReplaced && state.pane === "sample") void openSample(state.picked);
    }
    if (answer.status !== 304) banner(answer.ok ? "" : await answer.text());
  } catch { banner("the server does not answer; this page shows the last state"); }
  clearInterval(waiting);
  showLoading(1, 1);
  setTimeout(() => void poll(next), POLL_MS);
}

// Return a text that identifies a sample by its row; null without a row.
function identity(row) { return row ? JSON.stringify([row.where, row.index, row.status, row.length, row.reward, row.final]) : null; }

// Show the server's progress while it reads a large dump.
async function showReading() {
  try {
    const read = Number(await (await fetch("progress", { cache: "no-store" })).text());
    if (state.rows.length) return;
    showLoading(0, 0);
    byId("count").textContent = `reading, ${read} samples`;
  } catch { /* `poll` reports a failing server */ }
}

function banner(text) {
  byId("banner").textContent = text;
  byId("banner").hidden = !text;
}

function start() {
  initTheme();
  fillSelect("sort", SORTS[0][1], SORTS.slice(1));
  loadIndex(JSON.parse(byId("index").textContent));
  for (const id of CONTROLS) byId(id).addEventListener("input", filtersChanged);
  byId("viewport").addEventListener("scroll", () => requestAnimationFrame(drawRows));
  byId("rows").addEventListener("click", (event) => { const row = event.target.closest(".row"); if (row) void openSample(Number(row.dataset.position)); });
  byId("problems-only").addEventListener("click", toggleProblems);
  byId("overview").addEventListener("click", showOverview);
  byId("groups").addEventListener("click", showGroups);
  byId("theme").addEventListener("click", toggleTheme);
  byId("help").addEventListener("click", showKeys);
  document.addEventListener("keydown", onKey);
  addEventListener("resize", drawRows);
  addEventListener("popstate", readHash);
  readHash();
  if (state.live) void poll(null); else trackPageLoad();
}

start();
