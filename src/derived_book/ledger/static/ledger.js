// Filters of the ledger, by verdict, grade, paper, kind of check and words. What is chosen stands in the
// address, after the #, as in ledger.html#verdict=holds-if&paper=004: a filtered ledger can be linked.

const form = document.querySelector(".da-filter");
const rows = [...document.querySelectorAll(".da-ledger tbody tr")];
const text = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));

// What is chosen, without what is empty.
const choice = () => [...new FormData(form)].filter(([, value]) => value.trim());

function shows(row) {
  const chosen = new FormData(form);
  const [paper, kind] = [chosen.get("paper"), chosen.get("kind")];
  return (
    ["verdict", "grade"].every((field) => {
      const names = chosen.getAll(field);
      return !names.length || names.some((name) => row.classList.contains(`${field}-${name}`));
    }) &&
    (!paper || row.id.startsWith(`${paper}.`)) &&
    (!kind || row.classList.contains(`kind-${kind}`)) &&
    chosen.get("words").toLowerCase().split(/\s+/).every((word) => text.get(row).includes(word))
  );
}

function filter() {
  const filtered = choice().length > 0;
  rows.forEach((row) => (row.hidden = !shows(row)));
  for (const box of document.querySelectorAll("table.da-ledger, [id^=paper-]")) {
    box.hidden = filtered && !box.querySelector("tbody tr:not([hidden])");
  }
  const shown = rows.filter((row) => !row.hidden).length;
  form.querySelector("output").value = `${shown} of ${rows.length} items`;
}

function write() {
  const address = new URLSearchParams(choice()).toString();
  history.replaceState(null, "", address ? `#${address}` : location.pathname + location.search);
}

// An address without "=" names a row, or a place on the page: it must not be filtered away.
function read() {
  const address = location.hash.slice(1);
  const filters = address.includes("=");
  const chosen = new URLSearchParams(filters ? address : "");
  form.querySelectorAll("[type=checkbox]").forEach((box) => {
    box.checked = chosen.getAll(box.name).includes(box.value);
  });
  for (const field of ["paper", "kind", "words"]) form.elements[field].value = chosen.get(field) ?? "";
  filter();
  if (filters) return form.scrollIntoView();
  document.getElementById(decodeURIComponent(address))?.scrollIntoView();
}

form.addEventListener("input", () => (filter(), write()));
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(() => (filter(), write())));
addEventListener("hashchange", read);
location.hash ? read() : filter();
