// Writes libraries.js, libraries.css and LICENSES.txt into the given folder, from the packages in node_modules.
import { mkdir, readdir, readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { build } from "esbuild";

const [folder] = process.argv.slice(2);

const built = await build({
  entryPoints: ["libraries.js", "libraries.css"],
  bundle: true,
  minify: true,
  format: "iife",
  globalName: "libraries",
  target: "es2022",
  legalComments: "none", // the licences are added whole
  external: ["*.woff2"],
  write: false,
  metafile: true,
  outdir: folder,
});

const packages = [...new Set(Object.keys(built.metafile.inputs).flatMap((path) => /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(path)?.[1] ?? []))].sort();
const notices = await Promise.all(packages.map(noticeOf));

async function noticeOf(name) {
  const home = join("node_modules", name);
  const { version, license } = JSON.parse(await readFile(join(home, "package.json"), "utf8"));
  const file = (await readdir(home)).find((entry) => /^licen[cs]e/i.test(entry));
  if (!file) throw new Error(`${name} ${version} has no licence file`);
  return `${name} ${version} (${license})\n\n${(await readFile(join(home, file), "utf8")).trim()}\n`;
}

const licences = notices.join(`\n${"-".repeat(80)}\n\n`);
await mkdir(folder, { recursive: true });
await writeFile(join(folder, "LICENSES.txt"), licences);
for (const { path, text } of built.outputFiles) await writeFile(path, path.endsWith(".js") ? script(text) : style(text));

// add the licences, because pages are passed on to others; escape `<!--`, which has a meaning within a script element
function script(text) {
  return `/*\n${licences}*/\n` + text.replaceAll("<!--", "\\x3C!--");
}

// remove rules that load a font or an image: a page must load neither
function style(text) {
  return text.replace(/[^{}]*\{[^{}]*url\([^{}]*\}/g, "");
}
