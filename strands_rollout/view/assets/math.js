// The LaTeX that answers are written in, as MathML; what is not known stays as it was written.

const SYMBOLS = {
  alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ϵ", varepsilon: "ε", zeta: "ζ", eta: "η", theta: "θ", vartheta: "ϑ", iota: "ι", kappa: "κ", lambda: "λ", mu: "μ", nu: "ν", xi: "ξ", pi: "π", rho: "ρ",
  sigma: "σ", tau: "τ", upsilon: "υ", phi: "ϕ", varphi: "φ", chi: "χ", psi: "ψ", omega: "ω", Gamma: "Γ", Delta: "Δ", Theta: "Θ", Lambda: "Λ", Xi: "Ξ", Pi: "Π", Sigma: "Σ", Phi: "Φ", Psi: "Ψ", Omega: "Ω",
  infty: "∞", partial: "∂", nabla: "∇", ell: "ℓ", hbar: "ℏ", emptyset: "∅", varnothing: "∅", angle: "∠", degree: "°", circ: "∘", prime: "′", dots: "…", ldots: "…", cdots: "⋯", vdots: "⋮", ddots: "⋱", triangle: "△", square: "□", blacksquare: "■", aleph: "ℵ", Re: "ℜ", Im: "ℑ", top: "⊤", bot: "⊥",
};
const OPERATORS = {
  cdot: "⋅", times: "×", div: "÷", pm: "±", mp: "∓", ast: "∗", star: "⋆", oplus: "⊕", otimes: "⊗", le: "≤", leq: "≤", ge: "≥", geq: "≥", leqslant: "⩽", geqslant: "⩾", lt: "<", gt: ">", ne: "≠", neq: "≠", approx: "≈", equiv: "≡", cong: "≅", sim: "∼", simeq: "≃", propto: "∝", ll: "≪", gg: "≫",
  to: "→", rightarrow: "→", leftarrow: "←", Rightarrow: "⇒", Leftarrow: "⇐", leftrightarrow: "↔", Leftrightarrow: "⇔", implies: "⟹", iff: "⟺", mapsto: "↦", longrightarrow: "⟶", in: "∈", notin: "∉", ni: "∋", subset: "⊂", subseteq: "⊆", supset: "⊃", supseteq: "⊇", cup: "∪", cap: "∩", setminus: "∖",
  land: "∧", wedge: "∧", lor: "∨", vee: "∨", neg: "¬", lnot: "¬", forall: "∀", exists: "∃", mid: "∣", nmid: "∤", parallel: "∥", perp: "⟂", colon: ":", therefore: "∴", because: "∵", quad: " ", lfloor: "⌊", rfloor: "⌋", lceil: "⌈", rceil: "⌉", langle: "⟨", rangle: "⟩", vert: "|", lvert: "|", rvert: "|", Vert: "‖", lVert: "‖", rVert: "‖", "|": "‖", "{": "{", "}": "}", lbrace: "{", rbrace: "}", backslash: "\\",
};
const BIG = { sum: "∑", prod: "∏", int: "∫", iint: "∬", oint: "∮", bigcup: "⋃", bigcap: "⋂", lim: "lim", max: "max", min: "min", sup: "sup", inf: "inf", gcd: "gcd", lcm: "lcm", argmax: "arg max", argmin: "arg min" };
const NAMED = new Set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp det dim ker deg arg hom Pr".split(" "));
const ACCENTS = { hat: "^", widehat: "^", bar: "¯", overline: "¯", vec: "→", overrightarrow: "→", dot: "˙", ddot: "¨", tilde: "~", widetilde: "~" };
const SPACES = { ",": "0.17em", ":": "0.22em", ";": "0.28em", "!": "0", " ": "0.3em", quad: "1em", qquad: "2em", "~": "0.3em", thinspace: "0.17em", enspace: "0.5em" };
const IGNORED = new Set(["displaystyle", "textstyle", "limits", "nolimits", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr", "hline", "nonumber", "notag", "rm", "bf", "it", "centering", "cr"]);
const FENCES = { matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"], cases: ["{", ""], array: ["", ""], aligned: ["", ""], align: ["", ""], "align*": ["", ""], gathered: ["", ""], equation: ["", ""], "equation*": ["", ""], split: ["", ""], smallmatrix: ["", ""] };
const TEXTS_OF_MATH = { text: "", textrm: "", mathrm: "", mbox: "", hbox: "", operatorname: "", textit: "italic", textbf: "bold", mathbf: "bold", boldsymbol: "bold", mathbb: "double", mathcal: "script", mathsf: "", mathtt: "", texttt: "", mathit: "italic", textsf: "", mathfrak: "" };
const DOUBLE = { R: "ℝ", N: "ℕ", Z: "ℤ", Q: "ℚ", C: "ℂ", P: "ℙ", E: "𝔼", F: "𝔽" };
const MOST_DEPTH = 40;
const MOST_MATH = 4000;

function mathElement(tag, text, ...children) {
  const element = document.createElementNS(byId("math").namespaceURI, tag);
  if (text) element.textContent = visible(text);
  element.append(...children);
  return element;
}

function rowOf(nodes) { return nodes.length === 1 ? nodes[0] : mathElement("mrow", "", ...nodes); }

// The formula; as its source where it can't be read.
function formula(source, isDisplay) {
  const element = mathElement("math");
  if (isDisplay) element.setAttribute("display", "block");
  try {
    if (source.length > MOST_MATH) throw new Error("too long");
    const reader = { tokens: source.match(/\\[A-Za-z]+|\\[\s\S]|[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\s+|[\s\S]/gu) || [], at: 0, depth: 0, isDisplay };
    element.append(lines(reader, () => false));
  } catch { return make("code", "formula", source); }
  element.setAttribute("aria-label", visible(source));
  return element;
}

// rows and cells up to where `ends` says so: a table where there is more than one
function lines(reader, ends, isTable = false) {
  const rows = [[[]]];
  while (reader.at < reader.tokens.length && !ends(reader)) {
    const token = reader.tokens[reader.at];
    if (token === "\\\\" || token === "\\cr") { reader.at += 1; rows.push([[]]); skipOptional(reader); }
    else if (token === "&") { reader.at += 1; rows[rows.length - 1].push([]); }
    else rows[rows.length - 1].at(-1).push(...scripted(reader));
  }
  if (rows.length === 1 && rows[0].length === 1 && !isTable) return rowOf(rows[0][0]);
  const kept = rows.filter((cells) => cells.some((cell) => cell.length));
  return mathElement("mtable", "", ...kept.map((cells) => mathElement("mtr", "", ...cells.map((cell) => mathElement("mtd", "", ...cell)))));
}

// `\\[2pt]` sets a distance, which says nothing here
function skipOptional(reader) {
  if (reader.tokens[reader.at] !== "[") return;
  const end = reader.tokens.indexOf("]", reader.at);
  if (end > 0 && end - reader.at < 6) reader.at = end + 1;
}

function scripted(reader) {
  const nodes = atom(reader);
  const marks = { "^": null, _: null };
  for (;;) {
    while (/^\s/.test(reader.tokens[reader.at] || "") && /^[\^_]$/.test(reader.tokens[reader.at + 1] || "")) reader.at += 1;
    const token = reader.tokens[reader.at];
    if (token === "'") { reader.at += 1; marks["^"] = rowOf([...(marks["^"] ? [marks["^"]] : []), mathElement("mo", "′")]); }
    else if ((token === "^" || token === "_") && !marks[token]) { reader.at += 1; marks[token] = argument(reader); }
    else break;
  }
  const [above, below] = [marks["^"], marks._];
  if (!above && !below) return nodes;
  const base = nodes.length ? nodes.pop() : mathElement("mrow");
  const isUnder = reader.isDisplay && base.dataset.big;
  const tag = above && below ? (isUnder ? "munderover" : "msubsup") : above ? (isUnder ? "mover" : "msup") : isUnder ? "munder" : "msub";
  return [...nodes, mathElement(tag, "", base, ...(below ? [below] : []), ...(above ? [above] : []))];
}

function atom(reader) {
  const token = reader.tokens[reader.at];
  reader.at += 1;
  if (/^\s+$/.test(token)) return [];
  if (token === "{") return [group(reader)];
  if (token.startsWith("\\")) return command(reader, token.slice(1));
  if (/^[0-9]/.test(token)) return [mathElement("mn", token)];
  if (token === "~") return [space("0.3em")];
  return [mathElement(/^\p{L}$/u.test(token) ? "mi" : "mo", token === "-" ? "−" : token)];
}

// up to the brace that closes it
function group(reader) {
  if ((reader.depth += 1) > MOST_DEPTH) throw new Error("nested too deeply");
  const inside = lines(reader, ({ tokens, at }) => tokens[at] === "}");
  if (reader.tokens[reader.at] !== "}") throw new Error("a brace is not closed");
  reader.at += 1;
  reader.depth -= 1;
  return inside;
}

function argument(reader) {
  while (/^\s/.test(reader.tokens[reader.at] || "")) reader.at += 1;
  if (reader.at >= reader.tokens.length) throw new Error("an argument is missing");
  const digits = reader.tokens[reader.at];
  if (/^[0-9]{2}/.test(digits)) { // x^23 raises by 2 alone
    reader.tokens.splice(reader.at, 1, digits[0], digits.slice(1));
  }
  if ((reader.depth += 1) > MOST_DEPTH) throw new Error("nested too deeply");
  const found = rowOf(atom(reader));
  reader.depth -= 1;
  return found;
}

function rawArgument(reader) {
  while (/^[\s*]/.test(reader.tokens[reader.at] || "")) reader.at += 1;
  if (reader.tokens[reader.at] !== "{") { reader.at += 1; return reader.tokens[reader.at - 1] || ""; }
  let [text, open] = ["", 1];
  for (reader.at += 1; reader.at < reader.tokens.length; reader.at += 1) {
    const token = reader.tokens[reader.at];
    open += token === "{" ? 1 : token === "}" ? -1 : 0;
    if (!open) { reader.at += 1; return text; }
    text += token;
  }
  throw new Error("a brace is not closed");
}

function space(width) { const element = mathElement("mspace"); element.setAttribute("width", width); return element; }

function command(reader, name) {
  if (Object.hasOwn(SPACES, name)) return [space(SPACES[name])];
  if (Object.hasOwn(SYMBOLS, name)) return [mathElement("mi", SYMBOLS[name])];
  if (Object.hasOwn(OPERATORS, name)) return [mathElement("mo", OPERATORS[name])];
  if (Object.hasOwn(BIG, name)) { const big = mathElement(BIG[name].length > 1 && /^[a-z]/.test(BIG[name]) ? "mi" : "mo", BIG[name]); big.dataset.big = name.endsWith("int") ? "" : "1"; return [big]; }
  if (NAMED.has(name)) return [mathElement("mi", name), space("0.12em")];
  if (IGNORED.has(name)) return [];
  if (Object.hasOwn(TEXTS_OF_MATH, name)) return [textOfMath(rawArgument(reader), TEXTS_OF_MATH[name])];
  if (Object.hasOwn(ACCENTS, name)) { const over = mathElement("mover", "", argument(reader), mathElement("mo", ACCENTS[name])); over.setAttribute("accent", "true"); return [over]; }
  if (Object.hasOwn(STRUCTURES, name)) return STRUCTURES[name](reader);
  if (/^[%$#&_]$/.test(name)) return [mathElement("mo", name)];
  return [mathElement("mtext", "\\" + name)];
}

function textOfMath(text, style) {
  const shown = style === "double" ? [...text].map((letter) => DOUBLE[letter] || letter).join("") : text.replace(/\\([%$#&_{}])/g, "$1");
  const element = mathElement("mtext", shown.replace(/^ | $/g, "\u00a0"));
  if (style) element.setAttribute("class", "m-" + style);
  return element;
}

function fraction(reader) { return [mathElement("mfrac", "", argument(reader), argument(reader))]; }

function fenced(left, inside, right) {
  const fence = (text) => (text && text !== "." ? [mathElement("mo", text)] : []);
  return [mathElement("mrow", "", ...fence(left), inside, ...fence(right))];
}

function delimiter(reader) {
  while (/^\s/.test(reader.tokens[reader.at] || "")) reader.at += 1;
  const token = reader.tokens[reader.at] || "";
  reader.at += 1;
  return token.startsWith("\\") ? OPERATORS[token.slice(1)] || token.slice(1) : token;
}

const STRUCTURES = {
  frac: fraction, dfrac: fraction, tfrac: fraction, cfrac: fraction,
  binom: (reader) => { const both = mathElement("mfrac", "", argument(reader), argument(reader)); both.setAttribute("linethickness", "0"); return fenced("(", both, ")"); },
  sqrt: (reader) => {
    if (reader.tokens[reader.at] !== "[") return [mathElement("msqrt", "", argument(reader))];
    reader.at += 1;
    const index = lines(reader, ({ tokens, at }) => tokens[at] === "]");
    reader.at += 1;
    return [mathElement("mroot", "", argument(reader), index)];
  },
  boxed: (reader) => { const box = mathElement("mrow", "", argument(reader)); box.setAttribute("class", "boxed"); return [box]; },
  fbox: (reader) => STRUCTURES.boxed(reader),
  underline: (reader) => [mathElement("munder", "", argument(reader), mathElement("mo", "_"))],
  pmod: (reader) => [space("0.4em"), mathElement("mo", "("), mathElement("mi", "mod"), space("0.3em"), argument(reader), mathElement("mo", ")")],
  bmod: () => [space("0.25em"), mathElement("mi", "mod"), space("0.25em")],
  mod: () => [space("0.6em"), mathElement("mi", "mod"), space("0.3em")],
  not: (reader) => [mathElement("mo", (delimiter(reader) || "") + "\u0338")],
  color: (reader) => { rawArgument(reader); return []; },
  tag: (reader) => [space("1em"), mathElement("mtext", `(${rawArgument(reader)})`)],
  left: (reader) => {
    if ((reader.depth += 1) > MOST_DEPTH) throw new Error("nested too deeply");
    const left = delimiter(reader);
    const inside = lines(reader, ({ tokens, at }) => tokens[at] === "\\right");
    if (reader.at >= reader.tokens.length) throw new Error("no \\right");
    reader.at += 1;
    reader.depth -= 1;
    return fenced(left, inside, delimiter(reader));
  },
  begin: (reader) => {
    if ((reader.depth += 1) > MOST_DEPTH) throw new Error("nested too deeply");
    const name = rawArgument(reader);
    if (!Object.hasOwn(FENCES, name)) throw new Error("an unknown environment");
    if (name === "array") rawArgument(reader);
    const inside = lines(reader, ({ tokens, at }) => tokens[at] === "\\end", true);
    inside.setAttribute("class", /^(align|aligned|split|cases)/.test(name) ? "aligned" : "");
    reader.at += 1;
    rawArgument(reader);
    reader.depth -= 1;
    return fenced(FENCES[name][0], inside, FENCES[name][1]);
  },
};
