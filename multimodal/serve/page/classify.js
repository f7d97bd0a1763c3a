import { Work, element, files, make, post } from "/page/common.js";

const MOST = 10;  // labels of an image that are shown, and the most heat maps of a request
let work, images = [], waiting = [], scored = [];  // scores are kept, so that the slider needs no request

function row(one, { label, score }, least) {
  const name = make("button", { type: "button", className: "name", textContent: label, dir: "auto" });
  name.ariaPressed = String(one.shown === label);
  name.addEventListener("click", () => heat(one, label));
  return make("div", { className: score < least ? "bar below" : "bar" }, name,
    make("meter", { min: 0, max: 1, value: score, ariaLabel: label }),
    make("span", { className: "number", textContent: score.toFixed(2) }));
}

function card(one, least) {
  const best = one.scores[0], none = best.score < least, more = one.scores.length - MOST;
  const image = one.shown === null ? make("img", { src: one.url, alt: one.name })
    : make("img", { src: one.maps[one.shown], alt: `${one.name}: where it looks like ${one.shown}` });
  return make("li", {}, image, make("div", { className: "bars" },
    make("h3", { textContent: none ? "none of these" : best.label, className: none ? "none" : "", dir: "auto" }),
    make("p", { className: "hint", textContent: one.name }),
    ...one.scores.slice(0, MOST).map((score) => row(one, score, least)),
    make("p", { className: "hint", textContent: more > 0 ? `and ${more} more labels` : "" })));
}

function draw() {
  const least = Number(element("threshold").value);
  element("least").value = least.toFixed(2);
  element("heat-hint").hidden = !scored.length;
  const list = element("scores"), held = document.activeElement;  // a button keeps the focus
  const at = [...list.children].findIndex((own) => own.contains(held));
  list.replaceChildren(...scored.map((one) => card(one, least)));
  [...list.children[at]?.querySelectorAll("button") ?? []].find((button) => button.textContent === held.textContent)?.focus();
}

/** The form of a request about images, in the words of the last one. */
function asked(files, labels) {
  const form = new FormData();
  files.forEach((file) => form.append("images", file));
  labels.forEach((label) => form.append("labels", label));
  if (element("classify-model").value) form.append("model", element("classify-model").value);
  return form;
}

/** Show what in an image speaks for a label, or the image again. */
function heat(one, label) {
  one.wanted = one.wanted === label ? null : label;
  if (one.maps) return turn(one);
  if (!waiting.includes(one) && waiting.push(one) === 1) drawMaps();
}

function turn(one) {
  one.shown = one.wanted;
  draw();
}

/** Fetch the heat maps of the images that wait, one after the other. */
async function drawMaps() {
  while (waiting.length) {
    const [one] = waiting, form = asked([one.file], one.labels);
    form.append("heatmaps", Math.min(MOST, one.scores.length));
    const well = await work.run(`Drawing heat maps of ${one.name} …`, async (signal) => {
      const { data } = await (await post("/v1/classify", form, signal)).json();
      one.maps = Object.fromEntries(data[0].heatmaps.map(({ label, image }) => [label, image]));
      work.tell("");
    }, { "images[0]": one.name });
    if (!well) for (const left of waiting.splice(0)) left.wanted = null;
    else turn(waiting.shift());
  }
}

async function classify() {
  const labels = element("labels").value.split("\n").map((text) => text.trim()).filter(Boolean), sent = images;
  if (!sent.length) return work.tell("Drop or choose an image first.");
  const many = sent.length === 1 ? sent[0].name : `${sent.length} images`;
  const names = Object.fromEntries(sent.map((file, i) => [`images[${i}]`, file.name]));
  await work.run(`Classifying ${many} …`, async (signal) => {
    const { data } = await (await post("/v1/classify", asked(sent, labels), signal)).json();
    scored.forEach((one) => URL.revokeObjectURL(one.url));
    scored = data.map(({ scores }, i) => ({ file: sent[i], name: sent[i].name, url: URL.createObjectURL(sent[i]), scores, labels,
      maps: null, wanted: null, shown: null }));
    draw();
    work.tell(`Classified ${many}.`);
  }, names);
}

export function startClassify() {
  work = new Work("classify");
  files(element("images"), (chosen) => { images = chosen; classify(); });
  element("threshold").addEventListener("input", draw);
  element("score").addEventListener("click", classify);
  element("labels").addEventListener("keydown", (event) => { if (event.key === "Enter" && event.ctrlKey) classify(); });
  draw();
}
