import { Work, element, files, make, post } from "/page/common.js";

const MOST = 10;  // labels of an image that are drawn
let work, images = [], scored = [];  // scores are kept, so that the slider needs no request

function rows({ scores }, least) {
  const found = scores.slice(0, MOST).map(({ label, score }) => make("div", { className: score < least ? "bar below" : "bar" },
    make("span", { className: "name", textContent: label, dir: "auto" }),
    make("meter", { min: 0, max: 1, value: score, ariaLabel: label }),
    make("span", { className: "number", textContent: score.toFixed(2) })));
  const more = scores.length - MOST;
  return more > 0 ? [...found, make("p", { className: "hint", textContent: `and ${more} more labels` })] : found;
}

function draw() {
  const least = Number(element("threshold").value);
  element("least").value = least.toFixed(2);
  element("scores").replaceChildren(...scored.map((one) => {
    const best = one.scores[0], none = best.score < least;
    const title = make("h3", { textContent: none ? "none of these" : best.label, className: none ? "none" : "", dir: "auto" });
    return make("li", {}, make("img", { src: one.url, alt: one.name }),
      make("div", { className: "bars" }, title, make("p", { className: "hint", textContent: one.name }), ...rows(one, least)));
  }));
}

async function classify() {
  const labels = element("labels").value.split("\n").map((text) => text.trim()).filter(Boolean), sent = images;
  if (!sent.length) return work.tell("Drop or choose an image first.");
  const form = new FormData();
  sent.forEach((file) => form.append("images", file));
  labels.forEach((label) => form.append("labels", label));
  if (element("classify-model").value) form.append("model", element("classify-model").value);
  const many = sent.length === 1 ? sent[0].name : `${sent.length} images`;
  const names = Object.fromEntries(sent.map((file, i) => [`images[${i}]`, file.name]));
  await work.run(`Classifying ${many} …`, async (signal) => {
    const { data } = await (await post("/v1/classify", form, signal)).json();
    scored.forEach((one) => URL.revokeObjectURL(one.url));
    scored = data.map(({ scores }, i) => ({ file: sent[i], name: sent[i].name, url: URL.createObjectURL(sent[i]), scores, labels }));
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
