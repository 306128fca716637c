// Code in colors: comments, strings, numbers and words of the language, of the few languages that policies write.

const WORDS = {
  python: "and as assert async await break class continue def del elif else except False finally for from global if import in is lambda None nonlocal not or pass raise return True try while with yield match case print",
  js: "async await break case catch class const continue default delete do else export extends false finally for function if import in instanceof let new null of return switch this throw true try typeof undefined var void while yield interface type",
  c: "auto bool break case char class const continue default do double else enum false float fn for func go if impl import int interface let long match mut namespace new nil null package private pub public return short signed sizeof static struct switch this true type unsigned use using var void while",
  bash: "if then else elif fi for in do done while until case esac function return local export set echo exit cd test",
  sql: "select from where and or not in is null join left right inner outer on group by order having limit insert into values update set delete create table as distinct count sum avg min max union case when then else end with",
  json: "true false null",
};
const LANGUAGES = { py: "python", python3: "python", ipython: "python", javascript: "js", ts: "js", typescript: "js", jsx: "js", tsx: "js", cpp: "c", "c++": "c", java: "c", go: "c", rust: "c", cs: "c", kotlin: "c", sh: "bash", shell: "bash", zsh: "bash", console: "bash" };
const HASH_COMMENTS = new Set(["python", "bash"]);
const MOST_COLORED = 40000;

const KNOWN_WORDS = Object.fromEntries(Object.entries(WORDS).map(([language, words]) => [language, new Set(words.split(" "))]));

function languageOf(name) {
  const lower = String(name || "").toLowerCase();
  const known = LANGUAGES[lower] || lower;
  return Object.hasOwn(KNOWN_WORDS, known) ? known : "";
}

function pieceOf(language) {
  const comment = HASH_COMMENTS.has(language) ? "#[^\\n]*" : language === "sql" ? "--[^\\n]*" : "\\/\\/[^\\n]*|\\/\\*[\\s\\S]*?(?:\\*\\/|$)";
  const string = "\"\"\"[\\s\\S]*?(?:\"\"\"|$)|'''[\\s\\S]*?(?:'''|$)|\"(?:[^\"\\\\\\n]|\\\\.)*\"?|'(?:[^'\\\\\\n]|\\\\.)*'?|`(?:[^`\\\\]|\\\\.)*`?";
  return new RegExp(`(${language === "json" ? "$^" : comment})|(${string})|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)|([\\s\\S])`, "g");
}

// the text's own characters, in spans; a language that is not known stays as it is
function colored(text, name) {
  const language = languageOf(name);
  const shown = visible(text);
  const target = document.createDocumentFragment();
  if (!language || shown.length > MOST_COLORED) { target.append(shown); return target; }
  const words = KNOWN_WORDS[language];
  let plain = "";
  const add = (className, piece) => {
    if (!className) { plain += piece; return; }
    target.append(plain, make("span", className, piece));
    plain = "";
  };
  for (const [piece, comment, string, number, word] of shown.matchAll(pieceOf(language))) {
    const isWord = word && words.has(language === "sql" ? word.toLowerCase() : word);
    add(comment ? "c-comment" : string ? "c-string" : number ? "c-number" : isWord ? "c-word" : "", piece);
  }
  target.append(plain);
  return target;
}

function codeBlock(text, name) {
  const pre = make("pre", "code");
  pre.append(colored(text.replace(/\n$/, ""), name));
  return pre;
}

// what a call was given: code as code, values as JSON
function givenBlock(key, value) {
  if (typeof value !== "string") return codeBlock(JSON.stringify(value, null, 1), "json");
  if (/^(code|script|python|program|source)$/i.test(key)) return codeBlock(value, "python");
  if (/^(command|cmd|bash|shell)$/i.test(key)) return codeBlock(value, "bash");
  return /^(sql|query)$/i.test(key) && /^\s*(select|insert|update|delete|with)\b/i.test(value) ? codeBlock(value, "sql") : codeBlock(value, "");
}
