import { Work, element, events, fail, files, make, post, quiet, save } from "/page/common.js";
import { LiveText, recorder } from "/page/microphone.js";
import { Transcript, short } from "/page/transcript.js";

let work, transcript, player = null, file = null, recorded = false;

function play(seconds) {
  if (!player) return;
  player.currentTime = seconds;
  player.play().catch(() => {});  // ended by what came after
}

function hide() {
  if (!player) return;
  player.pause();
  URL.revokeObjectURL(player.src);
  player = null;
  element("player").replaceChildren();
}

function show(own) {
  hide();
  const kind = own.type.startsWith("video/") ? "video" : "audio";
  const made = player = make(kind, { controls: true, src: URL.createObjectURL(own), ariaLabel: `Player of ${own.name}` });
  const follow = () => {
    if (made !== player) return;
    transcript.follow(made.currentTime);
    if (!made.paused) requestAnimationFrame(follow);
  };
  made.addEventListener("error", () => made === player && hide());  // what no browser plays may be transcribed
  for (const kind of ["play", "seeked", "pause"]) made.addEventListener(kind, follow);
  element("player").replaceChildren(made);
}

/** Give a video its transcript as subtitles. */
function subtitle() {
  if (player?.localName !== "video") return;
  const source = URL.createObjectURL(new Blob([transcript.vtt()], { type: "text/vtt" }));
  player.replaceChildren(make("track", { kind: "captions", label: "Transcript", src: source, default: true }));
}

function live(text, partial = "") {
  const line = element("live");
  line.hidden = !(text || partial);
  line.replaceChildren(text, make("span", { className: "partial", textContent: partial ? ` ${partial}` : "" }));
  line.scrollTop = line.scrollHeight;
}

async function transcribe(own, fromMicrophone = false) {
  file = own;
  recorded = fromMicrophone;
  element("result").hidden = true;
  element("as-wav").hidden = !recorded;
  if (!recorded) live("");
  show(own);
  const form = new FormData();
  form.append("file", own, own.name);
  form.append("stream", "true");
  form.append("response_format", "verbose_json");
  if (element("transcribe-model").value) form.append("model", element("transcribe-model").value);
  if (element("language").value) form.append("language", element("language").value);
  const [path, doing, done] = element("translate").checked ? ["translations", "Translating", "Translated"]
    : ["transcriptions", "Transcribing", "Transcribed"];
  for (const kind of ["word", "segment"]) form.append("timestamp_granularities[]", kind);
  const began = performance.now();
  const well = await work.run(`${doing} ${own.name} …`, async (signal) => {
    let text = "", made = null;
    for await (const event of events(await post(`/v1/audio/${path}`, form, signal))) {
      if (event.type === "transcript.text.done") made = event;
      else live(text += event.delta);
    }
    transcript.draw(made);
    live("");
    subtitle();
    element("edit").ariaPressed = "false";
    element("result").hidden = !made.segments.length;
    const took = ((performance.now() - began) / 1000).toFixed(1);
    work.tell(made.segments.length ? `${done} ${short(made.duration)} of sound in ${took} s.` : "No speech was heard.");
  }, { file: own.name });
  if (!well && file === own) live("");
}

/** Record on the button, with the text so far. Returns whether it does, as a function. */
function microphone() {
  let text = null;
  return recorder(element("record"), element("level"), {
    begin: () => {
      quiet();
      work.stop();
      element("result").hidden = true;
      hide();
      live("");
      text = new LiveText(element("transcribe-model").value, element("language").value, live,
        () => work.tell("Recording. The text comes at the end, as this model does not write along."));
      work.tell("Recording …");
    },
    take: (samples, rate) => text.take(samples, rate),
    end: (made) => {
      text.close();
      transcribe(made, true);
    },
    fail: (error) => {
      work.tell("");
      fail(error);
    },
  });
}

function keyboard(event) {
  if (transcript.editing || event.target !== element("transcript") || !player) return;
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (step) player.currentTime = transcript.beside(player.currentTime, step) ?? player.currentTime;
  else if (event.key === " ") player.paused ? play(player.currentTime) : player.pause();
  else return;
  event.preventDefault();
}

export function startTranscribe() {
  work = new Work("transcribe");
  transcript = new Transcript(element("transcript"), play);
  element("transcript").addEventListener("keydown", keyboard);
  const recording = microphone();
  files(element("sound"), ([own]) => (recording() ? work.tell("Stop the recording first.") : transcribe(own)));
  element("edit").addEventListener("click", () => {
    transcript.edit(!transcript.editing);
    element("edit").ariaPressed = String(transcript.editing);
    if (!transcript.editing) subtitle();
  });
  element("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText(transcript.text());
    work.tell("Copied.");
  });
  const makers = { txt: () => transcript.text(), srt: () => transcript.srt(), vtt: () => transcript.vtt(),
    json: () => transcript.json(), wav: () => file };
  element("copy").hidden = !navigator.clipboard;  // which pages of plain http lack
  for (const button of document.querySelectorAll("[data-form]")) {
    const form = button.dataset.form;
    button.addEventListener("click", () => save(new Blob([makers[form]()]), `${file.name.replace(/\.\w+$/, "")}.${form}`));
  }
}
