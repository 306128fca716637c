// Code in colors, by highlight.js; code of a language that it does not know stays as it is.

const MAX_COLORED_CHARS = 20000;
// grammars take the square of the length of a word or a gap, but for these
const LONG_RUN = /[\w\u0080-\uffff]{200}|\s{200}/;
const LINEAR_GRAMMARS = new Set(["JSON", "Python"]);

// the text's own characters, in spans
function colored(text, language) {
  const shown = visible(text);
  const grammar = libraries.hljs.getLanguage(language);
  const isSlow = shown.length > MAX_COLORED_CHARS || (grammar && !LINEAR_GRAMMARS.has(grammar.name) && LONG_RUN.test(shown));
  if (!grammar || isSlow) return shown;
  // not the result's `value`, which is markup
  const { rootNode } = libraries.hljs.highlight(shown, { language, ignoreIllegals: true })._emitter;
  if (isTooDeep(rootNode)) return shown;
  const element = spanOf(rootNode);
  return element.textContent === shown ? element : shown; // where a grammar fails, the rest is missing
}

function spanOf({ scope, children }) {
  return make("span", scope ? "hljs-" + scope.split(".")[0] : "", "", ...children.map((child) => (typeof child === "string" ? child : spanOf(child))));
}

function codeBlock(text, language) {
  return make("pre", "code", "", colored(text.replace(/\n$/, ""), language));
}

// what a call was given: code as code, values as JSON
function givenBlock(key, value) {
  if (typeof value !== "string") return codeBlock(JSON.stringify(value, null, 1), "json");
  if (/^(code|script|python|program|source)$/i.test(key)) return codeBlock(value, "python");
  if (/^(command|cmd|bash|shell)$/i.test(key)) return codeBlock(value, "bash");
  return /^(sql|query)$/i.test(key) && /^\s*(select|insert|update|delete|with)\b/i.test(value) ? codeBlock(value, "sql") : codeBlock(value, "");
}
