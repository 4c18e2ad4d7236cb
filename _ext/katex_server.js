// Renders formulas for katex_prerender.py: one JSON array [tex, options] a line comes in, one JSON
// object {html} or {error} a line goes out. It ends when its standard input does.
const katex = require(require("path").resolve(process.argv[2]));

function render(line) {
  try {
    return { html: katex.renderToString(...JSON.parse(line)) };
  } catch (error) {
    return { error: String(error) };
  }
}

require("readline")
  .createInterface({ input: process.stdin })
  .on("line", (line) => process.stdout.write(JSON.stringify(render(line)) + "\n"));
