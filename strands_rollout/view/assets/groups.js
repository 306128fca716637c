// All groups side by side, with what each sample is worth within its own.

// files of a folder number their groups each for itself
function groupKey(row) { return `${row.file}:${row.group}`; }

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
  if (row.problems.length) element.firstChild.append(make("span", "badge " + problemTone(row.problems[0]), row.problems[0]));
  if (row.advantage !== null) {
    const bar = make("span", row.advantage < 0 ? "minus" : "");
    const share = Math.min(50, Math.abs(row.advantage) * 20);
    bar.style.width = share + "%";
    bar.style.left = (row.advantage < 0 ? 50 - share : 50) + "%";
    element.append(make("div", "dim", "advantage " + signed(row.advantage)), make("div", "signed", "", bar));
  }
  element.append(make("div", "", row.final.split("</think>").pop().trim() || "(no final words)"));
  if (row.part) element.firstChild.append(make("span", "dim", row.part));
  element.tabIndex = 0;
  element.setAttribute("role", "link");
  element.setAttribute("aria-label", `sample #${row.index}, reward ${number(row.reward)}` + (row.advantage === null ? "" : `, advantage ${signed(row.advantage)}`));
  element.addEventListener("click", () => void openSample(row.position));
  element.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.stopPropagation(); void openSample(row.position); } });
  return element;
}
