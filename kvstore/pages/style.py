"""The style sheet of all pages: colours by meaning, light and dark.

A colour stands for one thing everywhere: blue-grey is the engine's own, the two teals are
hits (DRAM strong, NVMe light), sand is what was never seen, amber what was evicted, brick
everything else that missed, pale grey the tail that is never stored.
"""

from __future__ import annotations

COLOURS = {  # name: light, dark
    "engine": ("#8c9fb2", "#71879d"),
    "dram": ("#0f766e", "#1f9d8f"),
    "nvme": ("#6dbfb1", "#9adace"),
    "never": ("#dccb9f", "#8d8261"),
    "evicted": ("#d98e2f", "#e0a050"),
    "other": ("#b5483f", "#e0705f"),
    "tail": ("#cbd1d6", "#4b555e"),
    "stored": ("#4a6fa5", "#7fa3d6"),
    "loaded": ("#0f766e", "#1f9d8f"),
    "promoted": ("#6dbfb1", "#9adace"),
    "demoted": ("#8c7ab0", "#a998cf"),
    "ours": ("#0f766e", "#2fb5a5"),
    "envelope": ("#20272c", "#e6eaed"),
    "bound": ("#9aa4ac", "#77828b"),
    "ref1": ("#c77f2a", "#dd9c4c"),
    "ref2": ("#4a6fa5", "#7fa3d6"),
    "ref3": ("#b5483f", "#e0705f"),
    "ref4": ("#8c7ab0", "#a998cf"),
    "ref5": ("#7d8a3c", "#a9b765"),
    "ref6": ("#a8647f", "#cf8ba6"),
}
_SURFACE = {  # paper, ink, soft ink, lines, cards, a marked row
    "paper": ("#fbfbf9", "#14181b"),
    "ink": ("#1c2328", "#e4e9ec"),
    "soft": ("#59646d", "#9ba7b0"),
    "line": ("#dde2e5", "#2c343a"),
    "card": ("#ffffff", "#1b2125"),
    "mark": ("#e7f3f0", "#17332f"),
}


def _variables(dark: bool) -> str:
    return "".join(f"--{name}:{both[dark]};" for name, both in {**_SURFACE, **COLOURS}.items())


_PAINT = "".join(
    f"i.c-{name}{{background:var(--{name})}}svg .c-{name}{{fill:var(--{name})}}svg .s-{name}{{stroke:var(--{name})}}"
    for name in COLOURS
)

_RULES = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1040px;margin:0 auto;padding:36px 24px 24px}
h1{font-size:27px;font-weight:650;letter-spacing:-.01em;margin:0 0 8px}
h2{font-size:18px;font-weight:650;margin:0 0 4px}
h3{font-size:14px;font-weight:600;margin:14px 0 2px}
p{margin:0 0 10px;max-width:76ch}
.lead{color:var(--soft)}.lead:first-of-type{color:var(--ink);font-size:16px}
.note,.soft{color:var(--soft)}
.verdict{font-size:17px;margin:18px 0 0}
section{margin-top:40px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(178px,1fr));gap:12px;margin-top:22px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px}
.what{color:var(--soft);font-size:13px}
.figure{font-size:25px;white-space:nowrap;font-weight:650;letter-spacing:-.01em;line-height:1.25;font-variant-numeric:tabular-nums}
.means{color:var(--soft);font-size:13px;line-height:1.4;margin-top:2px}
.scroll{overflow-x:auto}
.narrow table{width:auto;min-width:50%}
@media (max-width:640px){td .bar{width:84px}}
.tight .bar{width:84px}
bdi{display:inline-block;min-width:8em;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
figure{margin:0}
figcaption{color:var(--soft);font-size:13px;padding:8px 0 4px}
th{font-weight:600;font-size:13px;color:var(--soft);text-align:left;vertical-align:bottom;padding:5px 14px 5px 0;border-bottom:1px solid var(--line)}
td{padding:6px 14px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
th:last-child,td:last-child{padding-right:6px}
th.right,td.right{text-align:right;white-space:nowrap}
tr.marked td{background:var(--mark);font-weight:600}
tr.marked td:first-child{box-shadow:inset 3px 0 var(--ours);padding-left:10px}
code{font-family:ui-monospace,SFMono-Regular,Menlo,monospace;font-size:.93em}
td:last-child:not(.right){min-width:9em}
/* ten digits are shown, all are copied */
.hash{display:inline-block;max-width:10ch;overflow:hidden;white-space:nowrap;vertical-align:top;line-height:1.61}
.bar{display:flex;width:170px;height:12px;margin-top:5px;border-radius:3px;overflow:hidden;background:color-mix(in srgb,var(--line) 55%,transparent)}
.bar i{display:block;height:100%}
.whole .bar{width:100%;height:26px;border-radius:6px;margin:8px 0 2px}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 20px;margin:10px 0 4px;padding:0;font-size:13.5px}
.legend b{font-weight:600;font-variant-numeric:tabular-nums}
.chipped{white-space:nowrap}
.chip{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px}
details{margin-top:8px;font-size:14px}
summary{cursor:pointer;color:var(--soft)}
.plot{margin-top:6px}
.unit{margin:0;font-size:12.5px;font-weight:600}
.unit.x{text-align:center;max-width:none}
svg{display:block;width:100%;min-width:620px;height:auto;font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(380px,100%),1fr));gap:6px 28px}
.grid svg{min-width:340px}
svg text{fill:var(--soft);font-variant-numeric:tabular-nums}
svg .axis{stroke:var(--line);stroke-width:1}
svg .zero{stroke:var(--soft);stroke-width:1}
svg .line{fill:none;stroke-width:1.75;stroke-linejoin:round;stroke-linecap:round}
svg .thick{stroke-width:3.25}
svg .dashed{stroke-dasharray:6 4}
svg .dotted{stroke-dasharray:1.5 4}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(300px,100%),1fr));gap:12px 28px;margin:10px 0 0}
dt{font-weight:600}
dd{margin:0;color:var(--soft)}
footer{margin-top:44px;padding-top:12px;border-top:1px solid var(--line);color:var(--soft);font-size:13px}
.bar,.bar i,.chip{print-color-adjust:exact;-webkit-print-color-adjust:exact}
/* a narrow screen sees the newest hours first */
@media (max-width:640px){
main{padding:24px 16px 20px}
.tiles{grid-template-columns:repeat(auto-fit,minmax(150px,1fr))}
.figure{white-space:normal;overflow-wrap:anywhere;font-size:22px}
.newest{direction:rtl}.newest>*{direction:ltr}
.cards thead{display:none}
.cards table,.cards tbody,.cards tr,.cards td{display:block;width:100%}
.cards tr{border-bottom:1px solid var(--line);padding:8px 0}
.cards tr.marked td:first-child{padding-left:10px}
.cards td,.cards td:last-child{border:0;padding:2px 0;min-width:0;text-align:right;display:flex;justify-content:space-between;align-items:center;gap:16px;white-space:normal;overflow-wrap:anywhere}
.cards td::before{content:attr(data-column);color:var(--soft);font-size:13px;text-align:left;white-space:nowrap}
.cards td .bar{width:100%;margin:4px 0}
.cards bdi{min-width:0}
}
@media print{
body{background:none;font-size:13px}
main{max-width:none;padding:0}
h2,.note,figcaption{break-after:avoid}
.plot,.tile,tr,dl div{break-inside:avoid}
.scroll{overflow:visible}
svg,.grid svg{min-width:0}
table{font-size:10.5px}
th{font-size:10px}
th,td{padding-right:8px}
td .bar,.tight .bar{width:60px}
td:last-child:not(.right){min-width:6em}
}
"""

STYLE = (
    f":root{{color-scheme:light dark;{_variables(False)}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_variables(True)}}}}}{_RULES}{_PAINT}"
)
