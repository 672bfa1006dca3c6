// The style sheet of the report.
#pragma once

#include <string_view>

namespace lockstep::training::inline report {

/// Colors are CSS variables, with other values in dark mode. Contains no characters that XML requires to be escaped.
inline constexpr std::string_view kReportCss = R"(
:root { color-scheme: light dark; --back: #f6f7f9; --card: #ffffff; --text: #1c2430; --dim: #5b6675; --edge: #dde1e7;
  --grid: #e8ebf0; --bad: #c62828;
  --c0: #0b6bb5; --c1: #cf5b00; --c2: #0a8a63; --c3: #b4508f; --c4: #b58a00; --c5: #3c9bd6; --c6: #6a47a8;
  --c7: #77808c; }
@media (prefers-color-scheme: dark) { :root { --back: #12161c; --card: #1b212a; --text: #e4e8ee; --dim: #9aa5b4;
  --edge: #2c3541; --grid: #2a323d; --bad: #ff6b6b;
  --c0: #5ab0f0; --c1: #ff9a4d; --c2: #3fcf9f; --c3: #e58cc4; --c4: #e8c14a; --c5: #8fd0ff; --c6: #b69cf0;
  --c7: #98a2b0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px 12px 40px; max-width: 1200px; background: var(--back); color: var(--text);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 22px; margin: 4px 4px 10px; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 0 4px 16px; font-size: 14px; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 12px; }
section { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 12px; min-width: 0; }
section.wide { grid-column: 1 / -1; }
p { margin: 2px 0 8px; color: var(--dim); font-size: 13px; overflow-wrap: anywhere; }
p.bad { color: var(--bad); }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--dim); font-size: 10.5px; }
.scroll { overflow-x: auto; } .scroll svg { min-width: 560px; }
.grid { stroke: var(--grid); stroke-width: 1; fill: none; }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; } .band { stroke: none; opacity: 0.18; }
.area { stroke: none; opacity: 0.85; } .bad { stroke: var(--bad); stroke-width: 2; }
.operation { fill: var(--c6); }
.c0 { stroke: var(--c0); fill: var(--c0); } .c1 { stroke: var(--c1); fill: var(--c1); }
.c2 { stroke: var(--c2); fill: var(--c2); } .c3 { stroke: var(--c3); fill: var(--c3); }
.c4 { stroke: var(--c4); fill: var(--c4); } .c5 { stroke: var(--c5); fill: var(--c5); }
.c6 { stroke: var(--c6); fill: var(--c6); } .c7 { stroke: var(--c7); fill: var(--c7); }
.line.c0, .line.c1, .line.c2, .line.c3, .line.c4, .line.c5, .line.c6, .line.c7 { fill: none; }
.band, .area, .phase, .dot { stroke: none !important; }
.key { display: flex; flex-wrap: wrap; gap: 2px 12px; font-size: 13px; color: var(--dim); margin: 4px 0 0; }
.key span { overflow-wrap: anywhere; } .key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px;
  margin-right: 5px; }
i.c0 { background: var(--c0); } i.c1 { background: var(--c1); } i.c2 { background: var(--c2); }
i.c3 { background: var(--c3); }
i.c4 { background: var(--c4); } i.c5 { background: var(--c5); } i.c6 { background: var(--c6); }
i.c7 { background: var(--c7); }
table { border-collapse: collapse; font-size: 13px; white-space: nowrap; width: 100%; }
th, td { text-align: right; padding: 3px 10px 3px 0; border-bottom: 1px solid var(--grid); }
th { color: var(--dim); font-weight: 500; }
th:nth-child(2), td:nth-child(2) { text-align: left; }
.bar { display: flex; height: 12px; min-width: 120px; border-radius: 4px; overflow: hidden; background: var(--grid); }
.bar i { display: block; height: 100%; }
)";

}  // namespace lockstep::training::inline report
