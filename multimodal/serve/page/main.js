import { call, dataUrl, element, fail, quiet, state } from "/page/common.js";
import { startTranscribe } from "/page/transcribe.js";

const tabs = [...document.querySelectorAll("[role=tab]")];

function show(tab) {
  for (const one of tabs) {
    const own = one === tab;
    one.setAttribute("aria-selected", String(own));
    one.tabIndex = own ? 0 : -1;
    element(one.getAttribute("aria-controls")).hidden = !own;
  }
  quiet();
}

tabs.forEach((tab, number) => {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    const next = tabs[(number + step + tabs.length) % tabs.length];
    show(next);
    next.focus();
  });
});

// what lets go of a file over a dashed box gives it to the box's input
for (const box of document.querySelectorAll(".drop")) {
  const input = box.querySelector("input");
  box.addEventListener("dragover", (event) => { event.preventDefault(); box.classList.add("over"); });
  box.addEventListener("dragleave", () => box.classList.remove("over"));
  box.addEventListener("drop", (event) => {
    event.preventDefault();
    box.classList.remove("over");
    input.files = event.dataTransfer.files;
    input.dispatchEvent(new Event("change"));
  });
}

// classify: scores are kept, so that the slider needs no request
let scored = [];

function drawScores() {
  const least = Number(element("threshold").value);
  element("least").value = least.toFixed(2);
  element("scores").replaceChildren(...scored.map(({ name, url, scores }) => {
    const picture = Object.assign(document.createElement("div"), { className: "picture" });
    const bars = Object.assign(document.createElement("div"), { className: "bars" });
    picture.append(Object.assign(new Image(), { src: url, alt: name }), bars);
    if (scores[0].score < least) bars.append(Object.assign(document.createElement("strong"), { textContent: "none of these" }));
    for (const { label, score } of scores) {
      const row = Object.assign(document.createElement("div"), { className: "bar" });
      const meter = Object.assign(document.createElement("meter"), { min: 0, max: 1, value: score });
      meter.setAttribute("aria-label", label);
      row.append(label, meter, score.toFixed(2));
      bars.append(row);
    }
    return picture;
  }));
}

element("threshold").addEventListener("input", drawScores);
element("score").addEventListener("click", async () => {
  try {
    quiet();
    const form = new FormData(), files = [...element("images").files];
    files.forEach((file) => form.append("images", file));
    element("labels").value.split("\n").filter((text) => text.trim()).forEach((text) => form.append("labels", text.trim()));
    const found = await (await call("/v1/classify", { method: "POST", body: form })).json();
    scored = found.data.map(({ scores }, i) => ({ name: files[i].name, url: URL.createObjectURL(files[i]), scores }));
    drawScores();
  } catch (error) { fail(error); }
});

// search
element("find").addEventListener("click", async () => {
  try {
    quiet();
    const [file] = element("example").files, text = element("query").value.trim();
    const body = text ? { text } : { image: file && await dataUrl(file) };
    const found = await (await call("/v1/search", { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" } })).json();
    element("hits").replaceChildren(...found.data.map(({ file: name, score }) =>
      Object.assign(document.createElement("li"), { textContent: `${score.toFixed(3)}  ${name}` })));
  } catch (error) { fail(error); }
});

// ask: the conversation goes along with each question
const messages = [];

function said(kind, text) {
  const line = Object.assign(document.createElement("p"), { className: kind, textContent: text });
  element("turns").append(line);
  return line;
}

element("send").addEventListener("click", async () => {
  const text = element("question").value.trim(), [file] = element("medium").files;
  if (!text) return;
  const content = [{ type: "text", text }];
  try {
    quiet();
    if (file?.type.startsWith("image/")) content.unshift({ type: "image_url", image_url: { url: await dataUrl(file) } });
    else if (file) content.unshift({ type: "input_audio", input_audio: { data: (await dataUrl(file)).split(",")[1], format: "wav" } });
    messages.push({ role: "user", content });
    said("user", file ? `${text} (${file.name})` : text);
    const answer = said("assistant", "");
    const body = JSON.stringify({ messages, model: state.ask, stream: true });
    const response = await call("/v1/chat/completions", { method: "POST", body, headers: { "content-type": "application/json" } });
    let rest = "";
    for await (const part of response.body.pipeThrough(new TextDecoderStream())) {
      const lines = (rest + part).split("\n\n");
      rest = lines.pop();
      for (const line of lines.map((one) => one.replace(/^data: /, "")).filter((one) => one !== "[DONE]")) {
        const event = JSON.parse(line);
        if (event.error) throw new Error(event.error.message);
        answer.textContent += event.choices[0]?.delta.content ?? "";
      }
    }
    messages.push({ role: "assistant", content: answer.textContent.trim() || "." });
    element("medium").value = element("question").value = "";
  } catch (error) {
    messages.length -= messages.at(-1)?.role === "user" ? 1 : 0;
    fail(error);
  }
});
element("question").addEventListener("keydown", (event) => { if (event.key === "Enter") element("send").click(); });

startTranscribe();
try {
  const listed = await (await call("/v1/models")).json();
  const able = listed.data.filter((one) => one.tasks?.includes("chat"));
  state.ask = (able.find((one) => /any|vl|llava/i.test(one.id)) ?? able[0])?.id;
  element("state").textContent = `ready: ${listed.data.map((one) => one.id).join(", ")}`;
} catch (error) { element("state").textContent = error.message; }
