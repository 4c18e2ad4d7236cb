/* The search of this book ranks sections in the browser, from an index in a file beside this one.
   It needs no server, and fetches nothing. MiniSearch counts words; this script treats spellings
   and names of the same thing as the same word, and prefers words that are next to each other.

   `bookSearch` does not use the page, so that tests/test_search.py can run it in Node. */

const bookSearch = ({ sections, pages, stopwords }, MiniSearch, Stemmer) => {
  const GREEK = Object.fromEntries(
    ("α alpha β beta γ gamma δ delta ε epsilon ζ zeta η eta θ theta κ kappa λ lambda μ mu ν nu " +
      "ξ xi π pi ρ rho σ sigma τ tau φ phi χ chi ψ psi ω omega")
      .split(" ")
      .reduce((pairs, x, i, all) => (i % 2 ? pairs : [...pairs, [x, all[i + 1]]]), [])
  );
  const stemmer = new Stemmer();
  const ignored = new Set(stopwords.concat("can do does how we what when which who why you".split(" ")));
  // Words of a question that its answer need not contain.
  const aside = new Set("vs versus difference between should use i my me explained".split(" "));
  const once = (make, known = new Map()) => (word) => {
    if (!known.has(word)) known.set(word, make(word));
    return known.get(word);
  };

  // Small letters, no accents, Greek by name, one spelling for -ise and -ize, and for -our and -or.
  const plain = once((word) =>
    word
      .normalize("NFKD")
      .replace(/\p{M}/gu, "")
      .toLowerCase()
      .replace("√", "sqrt")
      .replace(/[α-ω]/g, (letter) => GREEK[letter] ?? letter)
      .replace(/([iy])z(?=[aei])/g, "$1s")
      .replace(/(?<=[a-z]{2})our(?=$|s$|ed$|ing$|hood|al)/, "or")
  );
  const stem = once((word) => stemmer.stemWord(word));

  // The words of a text with their places. "FlashAttention" and "cross-attention" count as two
  // adjacent words, and as one word.
  const COMPOUND = /[\p{L}\p{N}\p{M}√]+(?:[-_–][\p{L}\p{N}\p{M}]+)*/gu;
  const PART = /√|[^-_–√]+?(?=(?<=\p{Ll})\p{Lu}\p{Ll}|[-_–√]|$)/gu;
  const split = (text) =>
    [...text.matchAll(COMPOUND)].map(({ 0: whole, index }) =>
      [...whole.matchAll(PART)].map((part) => ({
        word: plain(part[0]),
        start: index + part.index,
        end: index + part.index + part[0].length,
      }))
    );
  const isTerm = (word) => word.length > 1 && !/^\d{1,3}$/.test(word) && !ignored.has(word);
  const terms = (text) =>
    split(text).flatMap((parts) => {
      const words = parts.map(({ word }) => word);
      if (words.length > 1) words.push(words.join(""));
      return words.filter(isTerm).flatMap((word) => [...new Set([word, stem(word)])]);
    });
  const line = (text) => ` ${split(text).flat().map(({ word }) => stem(word)).join(" ")} `;

  const index = new MiniSearch({
    fields: ["title", "page", "text", "code"],
    tokenize: terms,
    processTerm: (term) => term,
    searchOptions: {
      tokenize: (term) => [term],
      boost: { title: 4, page: 0.3, text: 1, code: 0.25 },
      weights: { prefix: 0.2, fuzzy: 1 },
    },
  });
  index.addAll(
    sections.map(({ titles, page, text = "", code = "" }, id) => ({
      id, title: titles.join("\n"), page: pages[page].title, text, code,
    }))
  );
  const lines = sections.map(() => null);
  const linesOf = (id) => {
    const { titles, text = "" } = sections[id];
    return (lines[id] ??= { titles: titles.map(line), text: line(text) });
  };

  // Sets of names that the glossary gives to the same thing.
  const synonyms = sections
    .filter(({ kind, titles }) => kind === "term" && titles.length > 1)
    .map(({ titles }) => titles.map((title) => split(title).flat().map(({ word }) => word)));
  const holds = (words, part, at) => part.every((word, i) => stem(word) === stem(words[at + i] ?? ""));
  const rewritten = (words) => {
    const found = [];
    for (const names of synonyms)
      for (const name of names)
        for (let at = 0; at + name.length <= words.length; at++)
          if (holds(words, name, at))
            for (const other of names)
              if (other !== name)
                found.push([...words.slice(0, at), ...other, ...words.slice(at + name.length)]);
    return found;
  };

  const query = (variants, all) => ({
    combineWith: "OR",
    queries: variants.map((words) => ({
      combineWith: all ? "AND" : "OR",
      queries: words.map((word) => ({
        combineWith: "OR",
        queries: [
          { queries: [word], prefix: word.length > 2 },
          { queries: word === stem(word) ? [] : [stem(word)] },
        ],
      })),
    })),
  });
  // A word that the book does not contain is replaced by the most common word of similar spelling.
  const corrected = (word) => {
    if (word.length < 4 || !isTerm(word) || index.search(query([[word]], true)).length) return word;
    const near = new Map();
    for (const { terms } of index.search({ queries: [word], fuzzy: 0.25 }))
      for (const term of terms) near.set(term, (near.get(term) ?? 0) + 1);
    return [...near].sort((a, b) => b[1] - a[1])[0]?.[0] ?? word;
  };

  const KINDS = { term: 1, section: 1, box: 1, api: 0.6, reference: 0.3 };
  const joined = (text) => text.replaceAll(" ", "");
  const bonus = (id, phrases) => {
    const { titles, text } = linesOf(id);
    const best = phrases.map((phrase) => {
      if (titles.some((title) => joined(title) === joined(phrase)))
        return sections[id].kind === "term" ? 16 : 8;
      const isQuestion = /^ (why|how|which|when) \S/.test(phrase);
      if (titles.some((title) => title.includes(phrase))) return isQuestion ? 24 : 3;
      // Two words are often neighbours by chance; four are a quotation.
      return text.includes(phrase) ? Math.min(2 ** (phrase.split(" ").length - 3), 16) : 1;
    });
    return Math.max(...best) * KINDS[sections[id].kind];
  };

  const search = (asked) => {
    const words = split(asked).flat().map(({ word }) => corrected(word));
    const kept = (list) => {
      const left = list.filter((word) => isTerm(word) && !aside.has(word));
      return left.length ? left : list.filter(isTerm);
    };
    const variants = [words, ...rewritten(words)];
    if (words.length > 1) variants.push([words.join("")]);
    const wanted = variants.map(kept).filter((list) => list.length);
    if (!wanted.length) return [];
    const bare = words.filter((word) => !aside.has(word));
    const phrases = [...variants, bare, ...wanted].map((list) => ` ${list.map(stem).join(" ")} `);
    const all = index.search(query(wanted, true));
    return (all.length ? all : index.search(query(wanted, false)))
      .filter(({ match }) => Object.values(match).flat().some((name) => name !== "page"))
      .map(({ id, score, terms }) => ({ id, terms, score: score * bonus(id, phrases) }))
      .sort((a, b) => b.score - a.score);
  };

  // A hit is quoted by the passage with most of the words, in parts, or by names in its code. The
  // link to the hit needs the first words of the passage.
  const BEFORE = 70;
  const LENGTH = 240;
  const quote = ({ id, terms: found }) => {
    const { text = "", code = "" } = sections[id];
    const wanted = new Set(found);
    const places = (text) =>
      split(text).flatMap((parts) => {
        const whole = parts.length > 1 && wanted.has(parts.map(({ word }) => word).join(""));
        return parts
          .map((part) => ({ ...part, stem: stem(part.word) }))
          .filter((part) => whole || wanted.has(part.word) || wanted.has(part.stem));
      });
    const marks = places(text);
    const names = marks.length ? [] : code.split(" ").filter((name) => places(name).length);
    const value = (i) => {
      const near = marks.filter((mark, j) => j >= i && mark.start < marks[i].start + LENGTH - BEFORE);
      const together = near.filter((mark, j) => j && mark.start - near[j - 1].end < 2);
      return new Set(near.map((mark) => mark.stem)).size + 0.1 * Math.min(together.length, 5);
    };
    const values = marks.map((_, i) => value(i));
    const first = marks[values.indexOf(Math.max(...values))];
    const paragraph = first ? text.lastIndexOf("\n", first.start) + 1 : 0;
    const cut = first && first.start - paragraph > BEFORE;
    const start = cut ? text.indexOf(" ", first.start - BEFORE) + 1 : paragraph;
    const long = text.length > start + LENGTH;
    const end = long ? text.lastIndexOf(" ", start + LENGTH) : text.length;
    const parts = [{ text: cut ? "… " : "" }];
    let at = start;
    for (const mark of marks.filter((mark) => mark.start >= start && mark.end <= end)) {
      const gap = text.slice(at, mark.start);
      const word = text.slice(mark.start, mark.end);
      if (parts.at(-1).found && /^[-–_ ]?$/.test(gap)) parts.at(-1).text += gap + word;
      else parts.push({ text: gap }, { text: word, found: true });
      at = mark.end;
    }
    parts.push({ text: text.slice(at, end) + (long ? " …" : "") });
    const words = first && /^\S+(?: \S+){2,5}/.exec(text.slice(first.start).split("\n")[0])?.[0];
    return { parts, names, words };
  };

  return { search, quote, sections, pages };
};

// --- the page ------------------------------------------------------------------------------------

const searchPage = () => {
  const PAGES = 10; // shown unfolded
  const SECTIONS = 3; // of each page, shown unfolded
  const form = document.querySelector(".bd-search-container form.bd-search");
  const field = form.querySelector("input");
  const place = document.querySelector("#da-found");
  const said = document.querySelector("#da-found-count");
  let book;

  const make = (tag, properties, ...children) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  };
  const more = (name, ...children) =>
    make("details", {}, make("summary", { textContent: name }), ...children);
  const count = (n, name) => `${n} ${name}${n === 1 ? "" : "s"}`;

  const link = ({ section, passage }) => {
    const { page, anchor, titles } = section;
    // The browser scrolls to these words if it can, and otherwise to the section.
    const words = passage.words
      ? `:~:text=${encodeURIComponent(passage.words).replace(/-/g, "%2D")}`
      : "";
    const title = titles.join(", ");
    return make("a", { href: `${book.pages[page].url}#${anchor}${words}`, textContent: title });
  };
  const item = (hit) => {
    const passage = book.quote(hit);
    const section = book.sections[hit.id];
    const quoted = passage.parts.map(({ text, found }) =>
      found ? make("mark", { textContent: text }) : text.replaceAll("\n", " · ")
    );
    const inCode = passage.names.flatMap((name) => [" ", make("code", { textContent: name })]);
    if (inCode.length) quoted.unshift("In the code:", ...inCode, ". ");
    return make("li", {}, link({ section, passage }), make("p", {}, ...quoted));
  };
  const group = (page, hits) => {
    const list = (part) => make("ul", {}, ...part.map(item));
    const rest = hits.slice(SECTIONS);
    const node = make("li", {}, make("h2", { textContent: book.pages[page].title }),
      list(hits.slice(0, SECTIONS)));
    if (rest.length) node.append(more(`${count(rest.length, "more section")} of this page`, list(rest)));
    return node;
  };

  const show = () => {
    const asked = field.value.trim();
    document.title = document.title.replace(/^.*?(?=Search)/, asked && `${asked} – `);
    place.replaceChildren();
    if (!asked) return said.replaceChildren();
    book ??= bookSearch(bookIndex, MiniSearch, Stemmer); // takes a moment
    const hits = book.search(asked);
    const pages = new Map();
    for (const hit of hits) {
      const { page } = book.sections[hit.id];
      pages.set(page, [...(pages.get(page) ?? []), hit]);
    }
    said.textContent = hits.length
      ? `${count(hits.length, "section")} on ${count(pages.size, "page")}`
      : `Nothing found for “${asked}”. Try fewer words, or look in the glossary.`;
    const groups = [...pages].map(([page, found]) => group(page, found));
    place.append(make("ol", {}, ...groups.slice(0, PAGES)));
    const rest = groups.slice(PAGES);
    if (rest.length) place.append(more(count(rest.length, "more page"), make("ol", {}, ...rest)));
  };
  const remember = () => {
    const address = new URL(location);
    address.searchParams.set("q", field.value.trim());
    history.replaceState(null, "", address);
  };

  let waiting;
  field.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { remember(); show(); }, 200);
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    clearTimeout(waiting);
    remember();
    show();
  });
  field.value = new URLSearchParams(location.search).get("q") ?? "";
  if (field.value) said.textContent = "Searching …";
  else field.focus();
  setTimeout(show, 20); // when the browser has drawn this
};

if (typeof document !== "undefined") searchPage();
