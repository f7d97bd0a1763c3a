import { make } from "/page/common.js";

const SLACK = 0.001;  // seconds: a player that is sent to 2.05 says 2.049999

const two = (number) => String(number).padStart(2, "0");

function clock(seconds, mark) {
  const thousandths = Math.round(seconds * 1000), whole = Math.floor(thousandths / 1000);
  const fraction = String(thousandths % 1000).padStart(3, "0");
  return `${two(Math.floor(whole / 3600))}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}${mark}${fraction}`;
}

export function short(seconds) {
  const whole = Math.floor(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

/** A transcript whose words know their time. `seek(seconds)` is called for one that is chosen. */
export class Transcript {
  constructor(root, seek) {
    this.root = root;
    this.seek = seek;
    this.words = [];
    this.segments = [];
    this.current = null;
    root.addEventListener("click", (event) => {
      const word = this.words.find((one) => one.node === event.target);
      if (word && !this.editing) seek(word.start);
    });
  }

  draw(result) {
    this.result = result;
    this.words = [];
    this.current = null;
    const waiting = [...result.words ?? []];
    this.segments = result.segments.map((segment, i) => {
      const last = i === result.segments.length - 1;
      const count = last ? waiting.length : waiting.findIndex((word) => word.start >= segment.end);
      const text = make("p", { dir: "auto" }, ...this.spans(segment.text.trim(), waiting.splice(0, count < 0 ? waiting.length : count)));
      const time = make("button", { type: "button", className: "time", textContent: short(segment.start) });
      time.ariaLabel = `Play from ${short(segment.start)}`;
      time.addEventListener("click", () => this.seek(segment.start));
      return { segment, text, row: make("div", { className: "segment" }, time, text) };
    });
    this.root.replaceChildren(...this.segments.map((one) => one.row));
    this.edit(false);
  }

  /** The words of a text, and what stands between them as it is: not every script has spaces. */
  spans(text, words) {
    const found = [];
    let place = 0;
    for (const { word, start, end } of words) {
      const at = text.indexOf(word, place);
      if (at < 0) continue;
      const node = make("span", { className: "word", textContent: word });
      this.words.push({ node, start, end });
      found.push(text.slice(place, at), node);
      place = at + word.length;
    }
    return [...found, text.slice(place)];
  }

  edit(on) {
    this.editing = on;
    this.root.classList.toggle("editing", on);
    for (const { text } of this.segments) {
      text.contentEditable = on ? "plaintext-only" : "false";
      if (on) {
        text.role = "textbox";
        text.ariaMultiLine = "true";
        text.ariaLabel = "Text of the segment";
      } else ["role", "aria-multiline", "aria-label"].forEach((name) => text.removeAttribute(name));
    }
    if (on) this.segments[0]?.text.focus();
  }

  /** Index of the last word that has begun at a time, -1 before the first. */
  place(seconds) {
    let low = 0, high = this.words.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.words[middle].start <= seconds + SLACK) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  /** Light up the word of a time. */
  follow(seconds) {
    const word = this.words[this.place(seconds)], now = word && seconds + SLACK < word.end ? word.node : null;
    if (now === this.current) return;
    this.current?.classList.remove("now");
    now?.classList.add("now");
    this.current = now;
    if (now && !this.editing) this.reveal(now);
  }

  /** Scroll the transcript, and not the page, to a word. */
  reveal(word) {
    const own = this.root.getBoundingClientRect(), { top, bottom } = word.getBoundingClientRect();
    if (top < own.top || bottom > own.bottom) this.root.scrollTop += top - own.top - own.height / 3;
  }

  /** Start of the word after that of a time, or before it; more than 0.25 s into a word, its own. */
  beside(seconds, step) {
    const place = this.place(seconds), within = seconds - this.words[place]?.start > 0.25;
    return this.words[place + (step < 0 && within ? 0 : step)]?.start;
  }

  lines() {
    return this.segments.map(({ segment, text }) => ({ ...segment, text: text.textContent.replace(/\s+/g, " ").trim() }));
  }

  text() { return this.lines().map((one) => one.text).join("\n") + "\n"; }

  srt() {
    return this.lines().map((one, i) =>
      `${i + 1}\n${clock(one.start, ",")} --> ${clock(one.end, ",")}\n${one.text.replaceAll("-->", "->")}\n`).join("\n");
  }

  vtt() {
    return `WEBVTT\n\n${this.lines().map((one) =>
      `${clock(one.start, ".")} --> ${clock(one.end, ".")}\n${escaped(one.text)}\n`).join("\n")}`;
  }

  json() {
    const segments = this.lines(), text = segments.map((one) => one.text).join(" ");
    const words = this.words.map(({ node, start, end }) => ({ word: node.isConnected ? node.textContent.trim() : "", start, end }));
    return JSON.stringify({ ...this.result, text, segments, words: words.filter((one) => one.word) }, null, 1) + "\n";
  }
}
