// Code with colors, by highlight.js; code in an unknown language stays plain.

const MAX_COLORED_CHARS = 20000;
// except in LINEAR_GRAMMARS, highlighting takes quadratic time in the length of a word or a gap
const LONG_RUN = /[\w\u0080-\uffff]{200}|\s{200}/;
const LINEAR_GRAMMARS = new Set(["JSON", "Python"]);

// Return the text as an element of colored spans, or the plain text if coloring is impossible, too slow, or fails.
function highlighted(text, language) {
  const shown = visible(text);
  const grammar = libraries.hljs.getLanguage(language);
  const isSlow = shown.length > MAX_COLORED_CHARS || (grammar && !LINEAR_GRAMMARS.has(grammar.name) && LONG_RUN.test(shown));
  if (!grammar || isSlow) return shown;
  // build elements from the parsed nodes: the result's `value` is markup, which never enters the page
  const { rootNode } = libraries.hljs.highlight(shown, { language, ignoreIllegals: true })._emitter;
  if (isTooDeep(rootNode)) return shown;
  const element = spanOf(rootNode);
  return element.textContent === shown ? element : shown; // if a grammar fails, text is missing
}

function spanOf({ scope, children }) {
  return make("span", scope ? "hljs-" + scope.split(".")[0] : "", "", ...children.map((child) => (typeof child === "string" ? child : spanOf(child))));
}

function codeBlock(text, language) {
  return make("pre", "code", "", highlighted(text.replace(/\n$/, ""), language));
}

// Show an argument of a call: code with colors, other values as JSON.
function argumentBlock(key, value) {
  if (typeof value !== "string") return codeBlock(JSON.stringify(value, null, 1), "json");
  if (/^(code|script|python|program|source)$/i.test(key)) return codeBlock(value, "python");
  if (/^(command|cmd|bash|shell)$/i.test(key)) return codeBlock(value, "bash");
  return /^(sql|query)$/i.test(key) && /^\s*(select|insert|update|delete|with)\b/i.test(value) ? codeBlock(value, "sql") : codeBlock(value, "");
}
