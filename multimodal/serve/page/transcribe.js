import { call, element, fail, quiet } from "/page/common.js";

const clock = (seconds, mark) => {
  const whole = new Date(Math.round(seconds * 1000)).toISOString().slice(11, 23);
  return whole.replace(".", mark);
};

function cues(result, mark, numbered) {
  return result.segments.map((one, i) =>
    `${numbered ? `${i + 1}\n` : ""}${clock(one.start, mark)} --> ${clock(one.end, mark)}\n${one.text.trim()}\n`).join("\n");
}

function offer(result) {
  const files = {
    txt: () => element("words").innerText.trim() + "\n",
    srt: () => cues(result, ",", true),
    vtt: () => `WEBVTT\n\n${cues(result, ".", false)}`,
    json: () => JSON.stringify(result, null, 1),
  };
  for (const [kind, text] of Object.entries(files)) {
    const link = element(`as-${kind}`);
    link.download = `transcript.${kind}`;
    link.href = "#";
    link.onclick = () => { link.href = URL.createObjectURL(new Blob([text()])); };
  }
  element("downloads").hidden = false;
}

function draw(result) {
  const player = element("player");
  element("words").replaceChildren(...result.words.flatMap((one) => {
    const word = Object.assign(document.createElement("span"), { textContent: one.word });
    word.dataset.start = one.start;
    word.dataset.end = one.end;
    word.addEventListener("click", () => { player.currentTime = one.start; player.play(); });
    return [word, " "];
  }));
}

async function transcribe(sound, name) {
  try {
    quiet();
    const player = element("player");
    player.src = URL.createObjectURL(sound);
    player.hidden = false;
    element("downloads").hidden = true;
    element("words").textContent = "…";
    const form = (more) => {
      const made = new FormData();
      made.append("file", sound, name);
      for (const [key, value] of Object.entries(more)) made.append(key, value);
      return made;
    };
    const streaming = await call("/v1/audio/transcriptions", { method: "POST", body: form({ stream: "true" }) });
    element("words").textContent = "";
    let rest = "";
    for await (const part of streaming.body.pipeThrough(new TextDecoderStream())) {
      const lines = (rest + part).split("\n\n");
      rest = lines.pop();
      for (const line of lines) {
        const event = JSON.parse(line.replace(/^data: /, ""));
        if (event.error) throw new Error(event.error.message);
        if (event.delta) element("words").textContent += event.delta;
      }
    }
    const fields = { response_format: "verbose_json", "timestamp_granularities[]": "word" };
    const body = form(fields);
    body.append("timestamp_granularities[]", "segment");
    const result = await (await call("/v1/audio/transcriptions", { method: "POST", body })).json();
    draw(result);
    offer(result);
  } catch (error) {
    element("words").textContent = "";
    fail(error);
  }
}

function recording() {
  const button = element("record");
  let recorder = null;
  button.addEventListener("click", async () => {
    if (recorder) { recorder.stop(); return; }
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      const parts = [];
      recorder = new MediaRecorder(stream);
      recorder.ondataavailable = (event) => parts.push(event.data);
      recorder.onstop = () => {
        stream.getTracks().forEach((track) => track.stop());
        recorder = null;
        button.textContent = "Record";
        transcribe(new Blob(parts, { type: parts[0]?.type }), "recording.webm");
      };
      recorder.start();
      button.textContent = "Stop";
    } catch (error) { fail(new Error(`the microphone cannot be used (${error.message})`)); }
  });
}

export function startTranscribe() {
  element("sound").addEventListener("change", () => {
    const [file] = element("sound").files;
    if (file) transcribe(file, file.name);
  });
  element("player").addEventListener("timeupdate", () => {
    const now = element("player").currentTime;
    for (const word of element("words").querySelectorAll("[data-start]"))
      word.classList.toggle("now", word.dataset.start <= now && now < word.dataset.end);
  });
  recording();
}
