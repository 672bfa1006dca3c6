// Part of language_data.js on the search page. Splits a query as site_pages.py splits the pages.
var splitQuery = (query) => query.split(/([\u3400-\u9fff]+)|[^\p{Letter}\p{Number}_]+/u).filter((part) => part)
  .flatMap((part) => /[\u3400-\u9fff]/.test(part) && part.length > 1
    ? Array.from({length: part.length - 1}, (_, i) => part.slice(i, i + 2)) : [part]);
// Among pages that only contain the words, those for users come first, and those in the language of the query.
Scorer.score = ([page, , , , score, , kind]) => {
  if (kind !== "text") return score;
  const chinese = /[\u3400-\u9fff]/.test(new URLSearchParams(location.search).get("q"));
  return score - 2 * /^(api|tests|docs\/internals)\//.test(page) - (/^docs\/zh\/|zh-CN/.test(page) !== chinese);
};
// Without a server, pages cannot be fetched to quote them in the results.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
