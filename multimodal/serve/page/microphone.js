import { key } from "/page/common.js";

const RATE = 16_000;
const REASONS = {
  NotAllowedError: "The microphone was not allowed. The browser's settings of this page can allow it.",
  NotFoundError: "No microphone was found.",
  NotReadableError: "The microphone is used by another program.",
};

function wav(parts, rate) {
  const bytes = parts.reduce((sum, part) => sum + part.byteLength, 0);
  const head = new DataView(new ArrayBuffer(44));
  const text = (at, letters) => [...letters].forEach((one, i) => head.setUint8(at + i, one.charCodeAt(0)));
  text(0, "RIFF");
  head.setUint32(4, 36 + bytes, true);
  text(8, "WAVEfmt ");
  head.setUint32(16, 16, true);
  head.setUint16(20, 1, true);  // PCM
  head.setUint16(22, 1, true);  // channels
  head.setUint32(24, rate, true);
  head.setUint32(28, 2 * rate, true);
  head.setUint16(32, 2, true);
  head.setUint16(34, 16, true);
  text(36, "data");
  head.setUint32(40, bytes, true);
  return new File([head, ...parts], "recording.wav", { type: "audio/wav" });
}

function context(stream) {
  const made = new AudioContext({ sampleRate: RATE });
  try {
    return [made, made.createMediaStreamSource(stream)];
  } catch {  // a browser that does not resample microphones
    made.close();
    const own = new AudioContext();
    return [own, own.createMediaStreamSource(stream)];
  }
}

/** Start to record. `take(samples, rate)` gets what is heard; the answer ends the recording and gives its file. */
async function record(take) {
  if (!navigator.mediaDevices) throw new Error("Browsers give the microphone only to pages of https or of this computer.");
  const wishes = { echoCancellation: false, noiseSuppression: false, channelCount: 1 };
  const stream = await navigator.mediaDevices.getUserMedia({ audio: wishes }).catch((error) => {
    throw new Error(REASONS[error.name] ?? `The microphone cannot be used (${error.message}).`);
  });
  const [audio, source] = context(stream), parts = [];
  try {
    await audio.audioWorklet.addModule("/page/worklet.js");
    await audio.resume();
  } catch (error) {
    stream.getTracks().forEach((track) => track.stop());
    throw new Error(`The microphone cannot be used (${error.message}).`);
  }
  const node = new AudioWorkletNode(audio, "samples", { numberOfOutputs: 0 });
  let ended;
  const end = new Promise((resolve) => { ended = resolve; });
  node.port.onmessage = ({ data }) => {
    if (data === null) return ended();
    parts.push(data);
    take(data, audio.sampleRate);
  };
  source.connect(node);
  return async () => {
    node.port.postMessage("end");
    await end;
    stream.getTracks().forEach((track) => track.stop());
    const rate = audio.sampleRate;
    await audio.close();
    return wav(parts, rate);
  };
}

/** Have a button begin and end recordings, whose level a meter shows. `on.begin()`; `on.take(samples, rate)`;
 * `on.end(file)`; `on.fail(error)`. Returns a function that knows whether one runs. */
export function recorder(button, level, on) {
  let stop = null, turning = false;
  const show = (running) => {
    button.textContent = running ? "Stop recording" : "Record";
    button.classList.toggle("on", running);
    level.hidden = !running;
  };
  const take = (samples, rate) => {
    const peak = samples.reduce((most, one) => Math.max(most, Math.abs(one)), 1) / 32768;
    level.value = 1 + Math.log10(peak) / 3;  // from -60 dB
    on.take(samples, rate);
  };
  button.addEventListener("click", async () => {
    if (turning) return;
    turning = true;
    try {
      if (stop) {
        const end = stop;
        stop = null;
        show(false);
        on.end(await end());
      } else {
        on.begin();
        stop = await record(take);
        show(true);
      }
    } catch (error) {
      on.fail(error);
    } finally {
      turning = false;
    }
  });
  return () => stop !== null;
}

/** Text of samples while they come: `told(lines, partial)` after each change. A model that cannot says so with `unable`. */
export class LiveText {
  constructor(model, language, told, unable) {
    this.asked = { ...(model && { model }), ...(language && { language }) };
    this.told = told;
    this.unable = unable;
    this.lines = [];
    this.waiting = [];
  }

  take(samples, rate) {
    this.socket ??= this.open(rate);
    if (this.socket.readyState === WebSocket.CONNECTING) this.waiting.push(samples);
    else if (this.socket.readyState === WebSocket.OPEN) this.socket.send(samples);
  }

  open(rate) {
    const place = new URL("/v1/audio/stream", location.href);
    place.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    place.search = new URLSearchParams({ rate, ...this.asked });
    const made = new WebSocket(place, key() ? ["realtime", `openai-insecure-api-key.${key()}`] : []);
    made.onopen = () => this.waiting.splice(0).forEach((samples) => made.send(samples));
    made.onmessage = ({ data }) => {
      const event = JSON.parse(data);
      if (event.error) return this.unable();
      if (event.type === "final") this.lines.push(event.text);
      if (event.type !== "summary") this.told(this.lines.join(" "), event.type === "partial" ? event.text : "");
    };
    made.onclose = ({ wasClean }) => { if (!wasClean) this.unable(); };
    return made;
  }

  close() {
    this.told = this.unable = () => {};
    this.socket?.close();
  }
}
