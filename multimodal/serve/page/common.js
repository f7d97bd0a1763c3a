export const element = (id) => document.getElementById(id);
export const state = {};

export function fail(error) {
  element("fault").textContent = error.message;
  element("fault").hidden = false;
}

export function quiet() {
  element("fault").hidden = true;
}

/** The response of an endpoint; an error has the server's message. A server with keys asks for one, once a tab. */
export async function call(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401) {
    const given = prompt("This server needs an API key");
    if (given) {
      sessionStorage.setItem("key", given);
      return call(path, options);
    }
  }
  if (!response.ok) {
    const told = await response.json().catch(() => null);
    throw new Error(told?.error?.message ?? `the server answered ${response.status}`);
  }
  return response;
}

export function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name}: cannot be read`));
    reader.readAsDataURL(file);
  });
}
