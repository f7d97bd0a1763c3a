import { call, element, key, make } from "/page/common.js";

const TASKS = {
  transcribe: "transcribes speech", classify: "classifies images", "embed-images": "vectors of images",
  embed: "vectors of texts", rerank: "relevance of texts", chat: "answers messages", translate: "translates",
};
const STATES = { ready: "ready", loading: "loading models …", failed: "models could not be loaded", stopping: "stopping" };
let listed = [], refused = null;  // the key with which the list was refused: it is not asked for again and again

export const model = (id) => listed.find((one) => one.id === id);

function line(name, state, tasks, summary) {
  return make("li", {}, make("strong", { textContent: name }), make("span", { className: `state ${state}`, textContent: state }),
    make("p", { textContent: tasks }), make("p", { className: "hint", textContent: summary }));
}

function fill(select, names) {
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => make("option", { value: name, textContent: name })));
  if (names.includes(chosen)) select.value = chosen;
  select.closest(".choice").hidden = names.length < 2;
}

/** Offer the languages of the model that transcribes; one for English or another language alone has none. */
function languages() {
  const select = element("language"), known = Object.entries(model(element("transcribe-model").value)?.languages ?? {}), chosen = select.value;
  if (select.dataset.known === (select.dataset.known = String(known))) return;  // a list that is open stays so
  const names = known.map(([code, name]) => [code, name[0].toUpperCase() + name.slice(1)]).toSorted((a, b) => a[1].localeCompare(b[1]));
  select.replaceChildren(...[["", "detect"], ...names].map(([value, textContent]) => make("option", { value, textContent })));
  if (known.some(([code]) => code === chosen)) select.value = chosen;
  for (const id of ["language", "translate"]) element(id).closest(".choice").hidden = !known.length;
  if (!known.length) element("translate").checked = false;
}

/** Chat models that hear and see stand first. */
function able(task) {
  const found = listed.filter((one) => one.tasks?.includes(task));
  return task === "chat" ? found.toSorted((a, b) => b.media.length - a.media.length) : found;
}

function draw({ data, indexes }) {
  listed = data;
  for (const select of document.querySelectorAll("[data-task]")) fill(select, able(select.dataset.task).map((one) => one.id));
  languages();
  for (const notice of document.querySelectorAll("[data-missing]")) {
    notice.hidden = able(notice.dataset.missing).length > 0;
    notice.closest("section").classList.toggle("unable", !notice.hidden);
  }
  fill(element("index"), indexes);
  element("no-index").hidden = indexes.length > 0;
  element("search").classList.toggle("unable", !indexes.length);
  const tasks = (one) => [...one.tasks.map((task) => TASKS[task] ?? task),
    ...(one.media.length ? [`takes ${one.media.join(", ")}`] : [])].join(" · ");
  element("model-list").replaceChildren(
    ...data.map((one) => (one.alias_of ? line(one.id, "ready", `another name of ${one.alias_of}`, "")
      : line(one.id, "ready", tasks(one), one.summary))),
    ...indexes.map((name) => line(name, "ready", "image index for searches", "")));
}

element("transcribe-model").addEventListener("change", languages);

/** Show the server's state, and look again while it loads or cannot be reached. */
export async function follow() {
  const shown = element("state");
  let state = "the server cannot be reached", health = null;
  try {
    health = await (await fetch("/health")).json();
    state = STATES[health.status] ?? health.status;
    if (health.status === "ready") {
      if (refused !== null && refused === String(key())) throw new Error("this server needs a key", { cause: "key" });
      draw(await (await call("/v1/models")).json());
    } else element("model-list").replaceChildren(...health.models.map((name) => line(name, "ready", "", "")),
      ...health.loading.map((name) => line(name, health.status === "failed" ? "failed" : "loading", "", "")));
  } catch (error) {
    if (health) state = error.message;
    if (error.cause === "key") refused = String(key());
    health = null;
  }
  const ready = health?.status === "ready";
  if (shown.textContent !== state) shown.textContent = state;
  shown.className = ready ? "ready" : health?.status === "loading" ? "loading" : "failed";
  setTimeout(follow, ready ? 15_000 : 1_500);
}
