// Charts without a library: bars, histograms and lines, with a color for each run; a click filters the list.

const MAX_BINS = 16;
const MAX_BARS = 8;
const STACK_HEIGHT = 110;

function vector(tag, attributes) {
  const element = document.createElementNS(byId("svg").namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function panel(title, ...children) {
  return make("section", "panel", "", make("h3", "", title), ...children.filter(Boolean));
}

function mean(values) { return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null; }

function knownValues(rows, valueOf) { return rows.map(valueOf).filter((value) => value !== null && value !== undefined && Number.isFinite(value)); }

function share(value) { return value === null ? "–" : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`; }

function compact(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size >= 10000 ? `${(value / 1000).toFixed(0)}k` : Number.isInteger(value) ? String(value) : size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

// Draw named entries in the given order, each with a bar per run; entries after the first 8 are only counted.
function barChart(title, entries, ...more) {
  if (!entries.length) return null;
  const most = Math.max(...entries.flatMap(({ counts }) => counts));
  const list = make("div", "bars");
  for (const { name, counts, tone, words, act, marked } of entries.slice(0, MAX_BARS)) {
    const lines = counts.map((count, run) => {
      const fill = make("span", `fill ${tone || "run" + run}`);
      fill.style.width = (most ? (100 * count) / most : 0) + "%";
      return make("span", "track", "", fill);
    });
    const text = counts.map((count, run) => (words ? words[run] : number(count))).join(" | ");
    const entry = button("entry", "", act);
    entry.append(make("span", "name", name), make("span", "lines", "", ...lines), make("span", "amount", text));
    if (marked) entry.setAttribute("aria-pressed", "true");
    list.append(entry);
  }
  if (entries.length > MAX_BARS) list.append(make("span", "dim", `and ${entries.length - MAX_BARS} more`));
  return panel(title, list, ...more);
}

function roundWidth(least) {
  const unit = 10 ** Math.floor(Math.log10(least));
  return unit * [1, 2, 5, 10].find((times) => times * unit >= least);
}

// Return round numbers between two values, about `most` of them and at least `least` apart.
function ticks(low, high, most, least = 0) {
  const width = Math.max(least, roundWidth((high - low || 1) / most));
  const first = Math.ceil(low / width);
  return Array.from({ length: Math.floor(high / width) - first + 1 }, (_, place) => Number(((first + place) * width).toPrecision(8)));
}

// Return bins with edges at round numbers; if there are at most 8 distinct values, a bin for each value.
function chooseBins(values) {
  const distinct = [...new Set(values)].sort((a, b) => a - b);
  if (distinct.length <= 8) return distinct.map((value) => ({ from: value, to: value, name: compact(value) }));
  const [low, high] = [distinct[0], distinct[distinct.length - 1]];
  const width = roundWidth((high - low) / MAX_BINS);
  const bins = [];
  for (let step = Math.floor(low / width); step * width <= high; step += 1) {
    const [from, to] = [step * width, (step + 1) * width].map((edge) => Number(edge.toPrecision(8)));
    bins.push({ from, to, name: compact(from) });
  }
  return bins;
}

function histogram(title, byRun, field, toneOfBin = () => "") {
  const all = byRun.flatMap((rows) => knownValues(rows, FIELDS[field]));
  if (!all.length) return null;
  const bins = chooseBins(all);
  const inBin = (value, { from, to }) => (from === to ? value === from : value >= from && value < to);
  const counts = bins.map((bin) => byRun.map((rows) => knownValues(rows, FIELDS[field]).filter((value) => inBin(value, bin)).length));
  // shares make runs of different sizes comparable
  const sizes = byRun.map((rows) => Math.max(1, knownValues(rows, FIELDS[field]).length));
  const most = Math.max(...counts.flatMap((one) => one.map((count, run) => count / sizes[run])));
  const columns = make("div", "columns-chart");
  bins.forEach((bin, place) => {
    const words = bin.from === bin.to ? [`${field}=${bin.from}`] : [`${field}>=${bin.from}`, `${field}<${bin.to}`];
    const column = button("column", "", () => toggleWords(field, words));
    column.title = `${words.join(" ")}: ${counts[place].join(" | ")}`;
    column.setAttribute("aria-label", column.title);
    const fills = counts[place].map((count, run) => {
      const fill = make("span", `fill ${(byRun.length === 1 && toneOfBin(bin)) || "run" + run}`);
      fill.style.height = (100 * count) / sizes[run] / most + "%";
      return fill;
    });
    if (bins.length <= 8) {
      const above = make("span", "tick above", counts[place].join(" | "));
      above.style.top = STACK_HEIGHT * (1 - Math.max(...counts[place].map((count, run) => count / sizes[run] / most))) + "px";
      column.append(above);
    }
    column.append(make("span", "stack", "", ...fills), make("span", "tick", bins.length <= 8 || place % 2 === 0 ? bin.name : ""));
    columns.append(column);
  });
  const values = byRun.map((rows) => knownValues(rows, FIELDS[field])).map((own) => (own.length ? `mean ${compact(mean(own))}, highest ${compact(own.reduce((a, b) => Math.max(a, b)))}` : "none"));
  return panel(title, columns, make("p", "note dim", values.join(" | ")));
}

// Draw lines over steps; `series` is [{name, color, points: [{x, y, count}]}].
function lineChart(series, shown, picked, onPick) {
  const points = series.flatMap((one) => one.points);
  const [left, right] = [Math.min(...points.map(({ x }) => x)), Math.max(...points.map(({ x }) => x))];
  const [least, most] = [Math.min(...points.map(({ y }) => y)), Math.max(...points.map(({ y }) => y))];
  const margin = (most - least || Math.abs(most) || 1) * 0.12;
  const [low, high] = [least - margin, most + margin];
  const place = ({ x, y }) => [right > left ? 2 + (96 * (x - left)) / (right - left) : 50, 100 - (100 * (y - low)) / (high - low)];
  const drawing = vector("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" });
  const plot = make("div", "plot" + (series.some((one) => one.points.length > 60) ? " many" : ""), "", drawing);
  const heights = ticks(low, high, 5).map((y) => [y, place({ x: left, y })[1]]);
  for (const [, y] of heights) drawing.append(vector("line", { class: "grid", x1: 0, x2: 100, y1: y, y2: y, "vector-effect": "non-scaling-stroke" }));
  for (const { name, color, points: own } of series) {
    drawing.append(vector("polyline", { class: `line ${color}`, points: own.map((point) => place(point).join(",")).join(" "), "vector-effect": "non-scaling-stroke" }));
    for (const point of own) {
      const dot = button(`dot ${color}` + (picked === String(point.x) ? " picked" : ""), "", () => onPick(point.x));
      const [across, down] = place(point);
      Object.assign(dot.style, { left: across + "%", top: down + "%" });
      dot.title = `${name}, step ${point.x}: ${shown(point.y)}, ${pluralize(point.count, "sample")}`;
      dot.setAttribute("aria-label", dot.title);
      plot.append(dot);
    }
  }
  const axisLabel = (side, at, text) => { const label = make("span", "", text); label.style[side] = at + "%"; return label; };
  const exact = (y) => (shown === share ? `${Number((100 * y).toPrecision(6))}%` : Math.abs(y) < 10000 ? String(y) : compact(y));
  const axis = make("div", "axis dim", "", ...heights.map(([y, at]) => axisLabel("top", at, exact(y))));
  const below = make("div", "axis axis-x dim", "", ...ticks(left, right, 8, 1).map((x) => axisLabel("left", place({ x, y: low })[0], String(x))));
  return [make("div", "chart", "", axis, plot), below];
}
