"""Look of a page: light or dark as the reader's system is, from a phone's width on. Nothing is loaded."""

import base64
import hashlib

STYLE = """:root{color-scheme:light dark;--text:#1f2328;--soft:#59636e;--page:#fff;--line:#d1d9e0;--box:#f3f5f7;
--right:#1a7f37;--wrong:#cf222e;--link:#0757ba;--S:#fde3b0;--D:#f9cdca;--I:#c9dcf7}
@media(prefers-color-scheme:dark){:root{--text:#e3e8ee;--soft:#9ba5b0;--page:#0f1318;--line:#3a424c;--box:#1a2028;
--right:#4cc264;--wrong:#ff7b72;--link:#79b8ff;--S:#664a09;--D:#73261f;--I:#1d4a7d}}
body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:1.5em auto;padding:0 1em;color:var(--text);
background:var(--page);overflow-wrap:break-word}
h1{font-size:1.6em}h2{font-size:1.2em;margin:2em 0 .5em;border-bottom:1px solid var(--line)}
h3{font-size:1em;margin:1.4em 0 .4em}a{color:var(--link)}small,.soft{color:var(--soft)}
.wide{overflow-x:auto}table{border-collapse:collapse;margin:.5em 0}
td,th{border:1px solid var(--line);padding:.2em .6em;text-align:left;vertical-align:top}th{background:var(--box)}
ul{padding-left:1.2em}li{overflow-wrap:anywhere}td{overflow-wrap:break-word;max-width:30em}pre{overflow-x:auto;background:var(--box);padding:.6em}
img{max-width:100%;height:auto}.plot{background:#fff;border-radius:4px}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(9em,1fr));gap:.7em;align-items:start}
.plots{grid-template-columns:repeat(auto-fill,minmax(min(100%,20em),1fr))}
figure{margin:0;padding:.4em;background:var(--box);border:2px solid transparent;border-radius:6px}
figure img,.gone{display:block;width:100%;aspect-ratio:1;object-fit:contain}
.gone{display:grid;place-items:center;color:var(--soft);text-align:center}
figcaption{margin-top:.3em;font-size:.87em;line-height:1.4;overflow-wrap:anywhere}
.right{border-color:var(--right)}.row{margin:1.2em 0;padding-bottom:1.2em;border-bottom:1px solid var(--line)}
.pair{display:grid;grid-template-columns:10em 1fr;gap:1em}
.pair+.grid{margin-top:.7em}.pair ol{margin:0;padding-left:3em}
@media(max-width:36em){.grid:not(.plots){grid-template-columns:repeat(auto-fill,minmax(7em,1fr))}
.pair{grid-template-columns:1fr}.pair>figure{max-width:14em}}
b.right{color:var(--right)}b.wrong{color:var(--wrong)}
audio{display:block;width:100%;max-width:30em;height:2.5em;margin:.4em 0}
.u>span{display:inline-block;margin-right:.35em;vertical-align:top;border-radius:3px}
.u i{font-style:normal;display:block;min-height:1.5em;padding:0 .15em}
.u button{font:inherit;color:inherit;background:none;border:0;padding:0;cursor:pointer;text-decoration:underline dotted}
.S{background:var(--S)}.D{background:var(--D)}.I{background:var(--I)}"""

# a click on a word plays from its time
SEEK = """document.addEventListener("click",e=>{const w=e.target.closest("[data-t]");if(!w)return;
const a=w.closest(".u").querySelector("audio");a.currentTime=+w.dataset.t;a.play()})"""
_HASH = base64.b64encode(hashlib.sha256(SEEK.encode()).digest()).decode()
# no other script runs, whatever a label says
POLICY = f"default-src 'none';style-src 'unsafe-inline';img-src data:;media-src data:;script-src 'sha256-{_HASH}'"
HEAD = (
    f'<!doctype html>\n<html lang=en><meta charset=utf-8><meta http-equiv=Content-Security-Policy content="{POLICY}">'
    "<meta name=viewport content='width=device-width,initial-scale=1'>"
)
