import { element, quiet } from "/page/common.js";
import { startAsk } from "/page/ask.js";
import { startClassify } from "/page/classify.js";
import { follow } from "/page/models.js";
import { startSearch } from "/page/search.js";
import { startTranscribe } from "/page/transcribe.js";

const tabs = [...document.querySelectorAll("[role=tab]")];
const KEYS = { ArrowRight: (i) => i + 1, ArrowLeft: (i) => i - 1, Home: () => 0, End: () => tabs.length - 1 };

function show(tab) {
  for (const one of tabs) {
    const own = one === tab;
    one.setAttribute("aria-selected", String(own));
    one.tabIndex = own ? 0 : -1;
    element(one.getAttribute("aria-controls")).hidden = !own;
  }
  tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
  quiet();
}

tabs.forEach((tab, number) => {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    const next = KEYS[event.key]?.(number);
    if (next === undefined) return;
    event.preventDefault();
    const chosen = tabs[(next + tabs.length) % tabs.length];
    show(chosen);
    chosen.focus();
  });
});

// a file that misses its box must not replace the page
for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => event.preventDefault());
element("fault-close").addEventListener("click", quiet);
element("base").textContent = `${location.origin}/v1`;

startTranscribe();
startClassify();
startSearch();
startAsk();
const asked = tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash);
if (asked) show(asked);
follow();
