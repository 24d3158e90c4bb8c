// Bundles src/ with its libraries and their licences into ../page.html, one page that needs no network.
import { build } from "esbuild";
import { readFile, writeFile } from "node:fs/promises";

const LIBRARIES = { preact: "LICENSE", htm: "LICENSE", "@dagrejs/dagre": "LICENSE", "@dagrejs/graphlib": "LICENSE" };

const result = await build({
  entryPoints: ["src/main.js"],
  bundle: true,
  minify: true,
  write: false,
  format: "esm",
  target: "es2022",
  legalComments: "none",
  charset: "utf8",
});
const licences = [];
for (const [name, file] of Object.entries(LIBRARIES)) {
  const { version, license } = JSON.parse(await readFile(`node_modules/${name}/package.json`, "utf8"));
  licences.push(`${name} ${version} (${license})\n\n${(await readFile(`node_modules/${name}/${file}`, "utf8")).trim()}`);
}
const parts = {
  STYLE: await readFile("src/style.css", "utf8"),
  SCRIPT: result.outputFiles[0].text.trim().replaceAll("</script", "<\\/script"),
  LICENCES: licences.join("\n\n----\n\n").replaceAll("--", "- -").replaceAll("<", "&lt;"),
};
const template = await readFile("src/page.html", "utf8");
await writeFile("../page.html", template.replace(/%(STYLE|SCRIPT|LICENCES)%/g, (_, name) => parts[name]));
