// Markdown, parsed by markdown-it; Temml parses the formulas in it. The page creates an element for each token, so that
// text of a sample is never parsed as HTML; links are inactive. Text that is too long or too deeply nested stays raw.

const MAX_MARKDOWN_CHARS = 60000;
const MAX_TOKENS = 20000;
const MAX_NESTING = 20;
const MAX_FORMULAS = 1000; // per text
const MAX_CHARS_OF_FORMULAS = 20000;
const MAX_FORMULA_CHARS = 2000;
const MAX_FORMULA_LINES = 40;
const MAX_PRICE_CHARS = 400; // two dollar signs further apart don't enclose a formula
const FORMULAS = [/^\$\$((?:[^\\$]|\\.|\$(?!\$))+)\$\$/s, /^\$((?:[^\\$]|\\.)+)\$(?!\d)/s, /^\\\(((?:[^\\]|\\[^()])+)\\\)/s, /^\\\[((?:[^\\]|\\[^[\]])+)\\\]/s];
// formulas that define macros stay raw: the macros could expand without bounds
const DEFINITION = /\\(?:[egx]?def|(?:future)?let|(?:re)?newcommand|providecommand|global)(?![A-Za-z])/;
const TEMML_OPTIONS = { trust: false, maxExpand: 200, maxSize: [30, 300], errorColor: "currentColor" };

const markdown = libraries.MarkdownIt({ html: false, linkify: false, maxNesting: MAX_NESTING });
// link definitions and entities stay raw: parsing would remove link definitions and replace entities
markdown.disable(["reference", "entity"]);
markdown.normalizeLink = (address) => address;
markdown.block.ruler.before("code", "formula_block", formulaBlock, { alt: ["paragraph", "blockquote", "list"] });
markdown.inline.ruler.before("escape", "formula", inlineFormula);

function renderMarkdown(text) {
  const target = make("div", "md");
  const tokens = text.length > MAX_MARKDOWN_CHARS ? null : markdown.parse(text, { formulas: 0, charsOfFormulas: 0 });
  // markdown-it drops blocks at deeper levels
  const isPlain = !tokens || tokens.length > MAX_TOKENS || tokens.some((token) => token.level >= MAX_NESTING - 1);
  if (isPlain) target.append(make("pre", "", text));
  else appendTokens(target, tokens);
  return target;
}

function appendTokens(target, tokens) {
  const open = [target];
  for (const token of tokens) {
    if (token.nesting < 0) { open.pop(); continue; }
    const parent = open[open.length - 1];
    if (token.type === "inline") {
      if (depthOf(token.children) > MAX_NESTING) parent.append(visible(token.content));
      else appendTokens(parent, token.children);
      continue;
    }
    const nodes = nodesOf(token);
    parent.append(...nodes);
    if (token.nesting > 0) open.push(nodes[0]);
  }
}

function depthOf(tokens) {
  let [depth, most] = [0, 0];
  for (const { nesting } of tokens) { depth += nesting; most = Math.max(most, depth); }
  return most;
}

// Return the nodes of a token; the token's children go into the first node.
function nodesOf(token) {
  switch (token.type) {
    case "heading_open": return [make("p", "h " + token.tag)];
    case "ordered_list_open": { const list = make("ol"); list.start = token.attrGet("start") ?? 1; return [list]; }
    case "link_open": return token.info === "auto" ? [make("span", "link")] : [make("span", "link"), linkTarget(token, "href")];
    case "image": return [make("span", "link", "image: " + token.content), linkTarget(token, "src")];
    case "fence": return [codeBlock(token.content, token.info.trim().split(/\s/)[0])];
    case "code_block": return [codeBlock(token.content, "")];
    case "code_inline": return [make("code", "", token.content)];
    case "formula": return [formulaElement(token.content, token.meta.isDisplay), visible(token.meta.rest)];
    case "softbreak": case "hardbreak": return ["\n"];
    case "hr": return [make("hr")];
    default: return [token.nesting > 0 ? make(token.tag) : visible(token.content)];
  }
}

// Return the target of an inactive link, which is shown beside it.
function linkTarget(token, name) {
  const title = token.attrGet("title");
  return make("span", "dim", ` (${token.attrGet(name)}${title ? ` "${title}"` : ""})`);
}

// Rule of markdown-it for $$ ... $$ and \[ ... \] from the start of a line to the end of a line; an unclosed formula is text.
function formulaBlock(state, first, last, silent) {
  const lineAt = (line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
  const close = { $$: "$$", "\\[": "\\]" }[lineAt(first).slice(0, 2)];
  if (!close) return false;
  const lines = [];
  for (let line = first; line < Math.min(last, first + MAX_FORMULA_LINES); line += 1) {
    if (state.sCount[line] < state.blkIndent && !state.isEmpty(line)) return false; // the list ends before this line
    const text = lineAt(line).slice(line === first ? 2 : 0);
    const end = text.indexOf(close);
    if (end < 0) { lines.push(text); continue; }
    const rest = text.slice(end + 2).trim();
    if (rest.length > 3) return false; // text follows on the same line
    if (!pushFormula(state, [...lines, text.slice(0, end)].join("\n"), { isDisplay: true, rest }, silent)) return false;
    if (!silent) state.line = line + 1;
    return true;
  }
  return false;
}

function inlineFormula(state, silent) {
  const found = formulaAt(state.src.slice(state.pos, Math.min(state.posMax, state.pos + MAX_FORMULA_CHARS)));
  if (!found || !pushFormula(state, found.source, { isDisplay: found.isDisplay, rest: "" }, silent)) return false;
  state.pos += found.length;
  return true;
}

// Add a formula; return false if there are too many or too long formulas, which would freeze the page. With `silent`, markdown-it
// only tests whether a formula could be added.
function pushFormula(state, content, meta, silent) {
  const { env } = state;
  if (env.formulas >= MAX_FORMULAS || env.charsOfFormulas + content.length > MAX_CHARS_OF_FORMULAS) return false;
  if (silent) return true;
  Object.assign(state.push("formula", "", 0), { content, meta });
  env.formulas += 1;
  env.charsOfFormulas += content.length;
  return true;
}

// Return the formula at the start of a text, and its length including delimiters; null without a formula.
function formulaAt(text) {
  const boxed = /^\\boxed\s*\{/.exec(text); // the usual answer, also outside of a formula
  if (boxed) {
    const length = lengthToBrace(text, boxed[0].length);
    return length ? { source: text.slice(0, length), length, isDisplay: false } : null;
  }
  const [whole, source] = FORMULAS.map((pattern) => pattern.exec(text)).find(Boolean) || [""];
  if (!whole || !source.trim()) return null;
  const isPrice = !whole.startsWith("$$") && whole[0] === "$" && (/^\s|\s$/.test(source) || source.length > MAX_PRICE_CHARS);
  return isPrice ? null : { source, length: whole.length, isDisplay: whole.startsWith("\\[") };
}

function lengthToBrace(text, from) {
  let open = 1;
  for (let at = from; at < text.length; at += 1) {
    open += text[at] === "{" ? 1 : text[at] === "}" ? -1 : 0;
    if (!open) return at + 1;
  }
  return 0;
}

// Return a formula as MathML, or its source if Temml can't parse it or returns other elements.
function formulaElement(source, isDisplay) {
  const written = visible(source);
  const plain = make("code", "formula", source);
  if (source.length > MAX_FORMULA_CHARS || DEFINITION.test(source)) return plain;
  const element = make(isDisplay ? "div" : "span", isDisplay ? "display" : "");
  try {
    libraries.temml.render(written, element, { ...TEMML_OPTIONS, displayMode: isDisplay });
  } catch { return plain; } // the parser may throw anything, including a stack overflow
  // an id or a link could imitate one of the page's own
  if (element.querySelector(".temml-error, [id], [href]") || isTooDeep(element)) return plain;
  element.title = written;
  return element;
}
