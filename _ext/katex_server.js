// Renders formulas for katex_prerender.py: reads a JSON array [tex, options] from each line of its
// standard input, and writes a line with a JSON object {html} or {error}, until the input ends.
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
