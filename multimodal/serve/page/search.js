import { Work, dataUrl, element, files, make, post } from "/page/common.js";

const MOST = 24;
let work;

function card({ file, score, thumbnail }) {
  const name = file.split(/[\\/]/).at(-1);
  const picture = thumbnail ? make("img", { src: thumbnail, alt: name })
    : make("div", { className: "blank", textContent: "no preview" });
  const made = make("li", { title: file }, picture,
    make("p", {}, make("span", { className: "name", textContent: name }), make("span", { className: "number", textContent: score.toFixed(3) })));
  if (thumbnail) {
    const like = make("button", { type: "button", textContent: "More like this", ariaLabel: `More like this: ${name}` });
    like.addEventListener("click", () => search({ image: thumbnail }, `images like ${name}`));
    made.append(like);
  }
  return made;
}

async function search(asked, told) {
  const index = element("index").value || undefined;
  await work.run(`Searching for ${told} …`, async (signal) => {
    const { data } = await (await post("/v1/search", { ...asked, index, top: MOST, thumbnails: true }, signal)).json();
    element("hits").replaceChildren(...data.map(card));
    work.tell(`The nearest ${data.length} to ${told}, best first.`);
  }, { image: told });
}

export function startSearch() {
  work = new Work("search");
  element("search-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = element("query").value.trim();
    if (text) search({ text }, `“${text}”`);
    else work.tell("Type what you look for, or drop an image.");
  });
  files(element("example"), async ([file]) => search({ image: await dataUrl(file) }, file.name));
}
