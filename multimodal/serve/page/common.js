export const element = (id) => document.getElementById(id);

/** A new element. Texts, whoever wrote them, are never read as HTML. */
export function make(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function fail(error) {
  element("fault-text").textContent = error.message;
  element("fault").hidden = false;
  console.info(error);
}

export function quiet() {
  element("fault").hidden = true;
}

export const key = () => sessionStorage.getItem("key");
let asking = null;

/** Ask for a key. Several requests that were refused share one question. */
function askKey() {
  asking ??= new Promise((resolve, reject) => {
    const dialog = element("key-dialog");
    element("key-wrong").hidden = key() === null;
    element("key").value = dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      if (dialog.returnValue !== "ok") return reject(new Error("this server needs a key", { cause: "key" }));
      sessionStorage.setItem("key", element("key").value.trim());
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** The response of an endpoint; errors are told in plain words. */
export async function call(path, options = {}) {
  const used = key();
  const headers = { ...options.headers, ...(used && { authorization: `Bearer ${used}` }) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached. Does it still run?");
  });
  if (response.status === 401) {
    if (key() === used) await askKey();
    return call(path, options);
  }
  if (response.ok) return response;
  const told = (await response.json().catch(() => null))?.error?.message;
  const wait = response.headers.get("retry-after");
  const later = wait ? ` Try again in ${wait} s.` : "";
  throw new Error((told ?? `The server answered with the error ${response.status}.`) + later);
}

export function post(path, body, signal) {
  const form = body instanceof FormData;
  const headers = form ? {} : { "content-type": "application/json" };
  return call(path, { method: "POST", body: form ? body : JSON.stringify(body), headers, signal });
}

/** The messages of a response of server-sent events. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts.map((one) => one.replace(/^data: /, ""))) {
      if (part === "[DONE]") return;
      const event = JSON.parse(part);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** Work of one panel, with its line of state and its button to stop: new work ends what still runs. */
export class Work {
  constructor(name) {
    this.panel = element(name);
    this.line = element(`${name}-state`);
    this.button = element(`${name}-stop`);
    this.button.addEventListener("click", () => { this.stop(); this.tell("Stopped."); });
  }

  get busy() { return !this.button.hidden; }

  tell(text) { this.line.textContent = text; }

  stop() { this.controller?.abort(); }

  /** Run `work(signal)`. Returns whether it ended well; errors are shown, with `names` in place of the server's. */
  async run(text, work, names = {}) {
    this.stop();
    const own = this.controller = new AbortController();
    quiet();
    this.tell(text);
    this.button.hidden = false;
    this.panel.ariaBusy = "true";
    try {
      await work(own.signal);
      return !own.signal.aborted;
    } catch (error) {
      if (own.signal.aborted) return false;
      this.tell("");
      for (const [place, name] of Object.entries(names)) error.message = error.message.replace(`${place}:`, `${name}:`);
      fail(error);
      return false;
    } finally {
      if (this.controller === own) {
        this.button.hidden = true;
        this.panel.ariaBusy = "false";
      }
    }
  }
}

/** Hand the files of an input, and those dropped on its box or panel, to `take`. */
export function files(input, take) {
  const panel = input.closest("section"), box = input.closest(".drop");
  input.addEventListener("change", () => {
    const chosen = [...input.files];
    input.value = "";  // the same file may be chosen again
    if (chosen.length) take(chosen);
  });
  panel.addEventListener("dragover", () => box.classList.add("over"));
  panel.addEventListener("dragleave", (event) => {
    if (!panel.contains(event.relatedTarget)) box.classList.remove("over");
  });
  panel.addEventListener("drop", (event) => {
    box.classList.remove("over");
    const dropped = [...event.dataTransfer.files];
    if (dropped.length) take(input.multiple ? dropped : dropped.slice(0, 1));
  });
}

export function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name}: cannot be read`));
    reader.readAsDataURL(file);
  });
}

export function save(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
