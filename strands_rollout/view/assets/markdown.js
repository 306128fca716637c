// Markdown, as elements that are made one by one: no text of a sample is ever read as markup, and no link leads anywhere.

const MOST_RENDERED = 60000;
const MOST_AHEAD = 3000;
const MOST_NESTED = 6;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,4}[.)])\s+(.*)$/;
const SPECIAL = /[\\`*_~$![]/g;

function rendered(text) {
  const target = make("div", "md");
  if (text.length > MOST_RENDERED) target.append(make("pre", "", text));
  else blocks(target, text.split("\n"), 0);
  return target;
}

function blocks(target, lines, depth) {
  let words = [];
  const flush = () => {
    if (words.length) { const p = make("p"); inline(p, words.join("\n"), 0); target.append(p); }
    words = [];
  };
  for (let at = 0; at < lines.length;) {
    const found = lines[at].trim() ? blockAt(lines, at, depth, words.length > 0) : [null, at + 1];
    if (found) { flush(); if (found[0]) target.append(found[0]); at = found[1]; } else { words.push(lines[at]); at += 1; }
  }
  flush();
}

// the element of the block that begins here, and the line after it; null where it is words of a paragraph
function blockAt(lines, at, depth, inWords) {
  const line = lines[at];
  if (line.length > MOST_AHEAD) return null;
  const fence = FENCE.exec(line);
  if (fence) return fencedCode(lines, at, fence);
  const heading = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/.exec(line);
  if (heading) { const element = make("p", "h h" + Math.min(4, heading[1].length)); inline(element, heading[2], 0); return [element, at + 1]; }
  if (/^ {0,3}([-*_])(?: *\1){2,} *$/.test(line)) return [make("hr"), at + 1];
  const math = displayMath(lines, at);
  if (math) return math;
  if (depth >= MOST_NESTED) return null;
  if (/^ {0,3}>/.test(line)) {
    let end = at;
    while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
    const quote = make("blockquote");
    blocks(quote, lines.slice(at, end).map((one) => one.replace(/^ {0,3}> ?/, "")), depth + 1);
    return [quote, end];
  }
  if (line.includes("|") && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$/.test((lines[at + 1] || "").slice(0, 400))) return table(lines, at);
  const item = ITEM.exec(line);
  return item && (!inWords || /^[-*+]|^1[.)]/.test(item[2])) ? list(lines, at, item, depth) : null;
}

function fencedCode(lines, at, [, ticks, name]) {
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(ticks) && !lines[end].trim().replaceAll(ticks[0], ""))) end += 1;
  return [codeBlock(lines.slice(at + 1, end).join("\n"), name), end + 1];
}

// $$ ... $$ and \[ ... \] that begin a line; without an end it is text
function displayMath(lines, at) {
  const begun = /^\s*(\$\$|\\\[)/.exec(lines[at]);
  if (!begun) return null;
  const close = begun[1] === "$$" ? "$$" : "\\]";
  for (let end = at; end < Math.min(lines.length, at + 40); end += 1) {
    const from = end === at ? begun[0].length : 0;
    const place = lines[end].indexOf(close, from);
    if (place < 0) continue;
    if (lines[end].slice(place + 2).trim().length > 3) return null; // in the middle of words
    const source = [...lines.slice(at, end), lines[end].slice(0, place)].join("\n").slice(begun[0].length);
    const block = make("div", "display", "", formula(source, true));
    block.append(visible(lines[end].slice(place + 2)));
    return [block, end + 1];
  }
  return null;
}

function cells(line) { return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim()); }

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const row = (line, tag) => make("tr", "", "", ...cells(line).map((text) => { const cell = make(tag); inline(cell, text, 0); return cell; }));
  const body = make("table", "", "", row(lines[at], "th"), ...lines.slice(at + 2, end).map((line) => row(line, "td")));
  return [make("div", "scroll", "", body), end];
}

// items at this indentation; deeper lines belong to the item before them
function list(lines, at, [, indent, mark], depth) {
  const isOrdered = /\d/.test(mark);
  const element = make(isOrdered ? "ol" : "ul");
  if (isOrdered) element.start = parseInt(mark, 10);
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== isOrdered) break;
    const inside = [item[3]];
    for (end += 1; end < lines.length; end += 1) {
      const line = lines[end];
      const isDeeper = /^\s/.test(line) && line.search(/\S/) > indent.length;
      if (line.trim() ? !isDeeper : !/^\s+\S/.test(lines[end + 1] || "")) break;
      inside.push(line.slice(Math.min(Math.max(line.search(/\S/), 0), indent.length + mark.length + 1)));
    }
    const entry = make("li");
    blocks(entry, inside, depth + 1);
    element.append(entry);
    while (end + 1 < lines.length && !lines[end].trim() && ITEM.test(lines[end + 1])) end += 1;
  }
  return [element, end];
}

// what closes it, if that comes soon; and what is between them
function upTo(text, from, close) {
  const place = text.slice(from, from + MOST_AHEAD).indexOf(close);
  return place < 0 ? null : [text.slice(from, from + place), from + place + close.length];
}

function inline(target, text, depth) {
  let plain = "";
  for (let at = 0; at < text.length;) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text);
    plain += text.slice(at, next ? next.index : text.length);
    if (!next) break;
    const found = depth < MOST_NESTED ? spanAt(text, next.index, depth) : null;
    if (!found) { plain += text[next.index]; at = next.index + 1; continue; }
    target.append(visible(plain), found[0]);
    plain = "";
    at = found[1];
  }
  target.append(visible(plain));
}

function spanAt(text, at, depth) {
  const rest = text.slice(at, at + 8);
  if (rest[0] === "`") return codeSpan(text, at);
  if (rest[0] === "$") return dollarMath(text, at);
  if (rest[0] === "\\") return afterBackslash(text, at);
  if (rest[0] === "[" || rest.startsWith("![")) return link(text, at, depth);
  for (const [mark, tag] of [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]]) {
    if (rest.startsWith(mark)) return marked(text, at, mark, tag, depth);
  }
  return null;
}

function codeSpan(text, at) {
  const ticks = /^`{1,8}/.exec(text.slice(at, at + 8))[0];
  const found = upTo(text, at + ticks.length, ticks);
  return found && found[0] ? [make("code", "", found[0].trim() || found[0]), found[1]] : null;
}

function dollarMath(text, at) {
  const close = text.startsWith("$$", at) ? "$$" : "$";
  const found = upTo(text, at + close.length, close);
  if (!found || !found[0].trim() || found[0].includes("\n\n")) return null;
  // prices are no formula
  if (close === "$" && (/^\s|\s$/.test(found[0]) || /\d/.test(text[found[1]] || "") || found[0].length > 400)) return null;
  return [formula(found[0], false), found[1]];
}

function afterBackslash(text, at) {
  const two = text.slice(at, at + 2);
  if (two === "\\(" || two === "\\[") {
    const found = upTo(text, at + 2, two === "\\(" ? "\\)" : "\\]");
    return found ? [formula(found[0], two === "\\["), found[1]] : null;
  }
  if (text.startsWith("\\boxed{", at)) { // the usual answer, outside of a formula too
    const end = closingBrace(text, at + 7);
    return end < 0 ? null : [formula(text.slice(at, end), false), end];
  }
  return /^\\[*_`$~[\]#]$/.test(two) ? [document.createTextNode(two[1]), at + 2] : null;
}

function closingBrace(text, from) {
  let open = 1;
  for (let at = from; at < Math.min(text.length, from + MOST_AHEAD); at += 1) {
    open += text[at] === "{" ? 1 : text[at] === "}" ? -1 : 0;
    if (!open) return at + 1;
  }
  return -1;
}

// shown with its address, since it leads nowhere
function link(text, at, depth) {
  const found = /^(!?)\[([^\]\n]{0,300})\]\(([^)\s]{1,600})\)/.exec(text.slice(at, at + 920));
  if (!found) return null;
  const element = make("span", "link", found[1] ? "image: " : "");
  inline(element, found[2], depth + 1);
  element.append(make("span", "dim", ` (${found[3]})`));
  return [element, at + found[0].length];
}

function marked(text, at, mark, tag, depth) {
  const isWordy = mark[0] === "_" && /\w/.test(text[at - 1] || "");
  if (isWordy || /\s/.test(text[at + mark.length] || " ")) return null;
  const found = upTo(text, at + mark.length, mark);
  if (!found || !found[0] || /\s$/.test(found[0]) || found[0].includes("\n\n")) return null;
  if (mark[0] === "_" && /\w/.test(text[found[1]] || "")) return null;
  const element = make(tag);
  inline(element, found[0], depth + 1);
  return [element, found[1]];
}
