import { Work, dataUrl, element, events, fail, files, make, post, quiet } from "/page/common.js";
import { recorder } from "/page/microphone.js";
import { model } from "/page/models.js";

let work, messages = [], attached = [];

const kind = (file) => file.type.split("/")[0];

function player(file) {
  const url = URL.createObjectURL(file);
  if (kind(file) === "image") return make("img", { src: url, alt: file.name });
  return make(kind(file), { src: url, controls: true, ariaLabel: file.name });
}

function bubble(role, text, media = []) {
  const words = make("p", { textContent: text, dir: "auto" });
  const made = make("div", { className: `turn ${role}` },
    make("span", { className: "unseen", textContent: role === "user" ? "You:" : "Answer:" }), ...media.map(player), words);
  const turns = element("turns");
  turns.hidden = element("new-talk").hidden = false;
  turns.append(made);
  turns.scrollTop = turns.scrollHeight;
  return words;
}

function drawAttached() {
  element("attached").replaceChildren(...attached.map((file) => {
    const away = make("button", { type: "button", textContent: "✕", ariaLabel: `Remove ${file.name}` });
    away.addEventListener("click", () => {
      attached = attached.filter((one) => one !== file);
      drawAttached();
    });
    const small = kind(file) === "image" ? [make("img", { src: URL.createObjectURL(file), alt: "" })] : [];
    return make("li", {}, ...small, make("span", { className: "name", textContent: file.name }), away);
  }));
}

function attach(chosen) {
  quiet();
  const takes = model(element("ask-model").value)?.media ?? [];
  for (const file of chosen) {
    if (takes.includes(kind(file))) attached = [...attached, file];
    else fail(new Error(`${file.name}: this model takes ${takes.join(", ") || "text alone"}.`));
  }
  drawAttached();
}

async function part(file) {
  const url = await dataUrl(file);
  if (kind(file) !== "audio") return { type: `${kind(file)}_url`, [`${kind(file)}_url`]: { url } };
  return { type: "input_audio", input_audio: { data: url.split(",")[1], format: file.name.split(".").at(-1) } };
}

async function ask(text) {
  const media = attached, asked = messages;
  bubble("user", text, media);
  const answer = bubble("assistant", "…");
  attached = [];
  drawAttached();
  element("question").value = "";
  element("turns").ariaBusy = "true";  // a screen reader reads the answer once, at its end
  const well = await work.run("Answering …", async (signal) => {
    const message = { role: "user", content: [...await Promise.all(media.map(part)), { type: "text", text }] };
    const sent = [...asked, message];
    let told = "";
    const body = { messages: sent, model: element("ask-model").value || undefined, stream: true };
    for await (const event of events(await post("/v1/chat/completions", body, signal))) {
      told += event.choices[0]?.delta.content ?? "";
      answer.textContent = told.trimStart();
      element("turns").scrollTop = element("turns").scrollHeight;
    }
    told = told.trim();
    answer.textContent = told || "(no answer)";
    messages = [...sent, { role: "assistant", content: told || "." }];
    work.tell("");
  });
  element("turns").ariaBusy = "false";
  if (!well && messages === asked) {  // the question may be asked again
    answer.parentElement.previousSibling.remove();
    answer.parentElement.remove();
    if (!attached.length && !element("question").value) {
      attached = media;
      element("question").value = text;
      drawAttached();
    }
  }
}

export function startAsk() {
  work = new Work("ask");
  files(element("medium"), attach);
  recorder(element("ask-record"), element("ask-level"), { begin: quiet, take: () => {}, end: (made) => attach([made]), fail });
  const send = () => {
    const text = element("question").value.trim();
    if (work.busy) work.tell("Wait for the answer, or stop it.");
    else if (text) ask(text);
    else work.tell("Type a question first.");
  };
  element("ask-form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  element("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  for (const example of element("examples").querySelectorAll("button")) {
    example.addEventListener("click", () => { element("question").value = example.textContent; element("question").focus(); });
  }
  element("new-talk").addEventListener("click", () => {
    work.stop();
    [messages, attached] = [[], []];
    element("turns").replaceChildren();
    element("turns").hidden = element("new-talk").hidden = true;
    drawAttached();
    element("question").focus();
  });
}
