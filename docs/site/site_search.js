// Part of language_data.js on the search page. Splits a query as site_pages.py splits the pages.
var splitQuery = (query) => query.split(/([\u3400-\u9fff]+)|[^\p{Letter}\p{Number}_]+/u).filter((part) => part)
  .flatMap((part) => /[\u3400-\u9fff]/.test(part) && part.length > 1
    ? Array.from({length: part.length - 1}, (_, i) => part.slice(i, i + 2)) : [part]);
// Among pages that only contain the words, those for users come first, and for a name like LOCKSTEP_LOG the reference.
// Pages in another language than the query are behind those in its own, and overviews behind other pages.
Scorer.score = ([page, , , , score, , kind]) => {
  const query = new URLSearchParams(location.search).get("q");
  const other = /^docs\/zh\/|zh-CN/.test(page) !== /[\u3400-\u9fff]/.test(query);
  const reference = /^docs\/reference\//.test(page) && /^[A-Z_]{4,}$/.test(query);
  const lower = kind === "text" && /^(api\/|tests\/|docs\/internals\/|docs\/status|docs\/benchmarks|C)/.test(page);
  return (lower ? score / 2 : score) - 2000 * other - 150 * /README/.test(page) + reference;
};
// A page seldom has all words of a question. Then those with most of them are found; rare words count more.
// (Sphinx leaves out words of one or two characters, such as the pairs of Chinese ones, when it looks for all of them.)
const findAll = Search.performTermsSearch;
Search.performTermsSearch = (terms, excluded) => {
  const found = [...terms].some((term) => /[\u3400-\u9fff]/.test(term)) ? [] : findAll(terms, excluded);
  const pages = new Map(found.map((hit) => [hit[0], hit]));
  for (const term of found.length > 4 || (found.length && terms.size < 2) ? [] : terms) {
    const hits = findAll(new Set([term]), excluded);
    for (const hit of hits) {
      const weight = Math.log(1 + Search._index.docnames.length / hits.length);
      pages.set(hit[0], Object.assign([...hit], {4: (pages.get(hit[0])?.[4] ?? 0) + hit[4] * weight}));
    }
  }
  return [...pages.values()];
};
// Without a server, pages cannot be fetched to quote them in the results.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
