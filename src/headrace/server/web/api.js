// Calls of the server this page came from. Errors carry the server's own words.

const ROOT = new URL("../", import.meta.url);
const KEY = "headrace-api-key";

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status; // 0: the server was not reached
  }
}

let ask = null; // async (message) => key, or null where the user declines
let asking = null; // one question at a time, however many calls wait for the key

/** `question` is called with the server's words when a key is needed. */
export function onKeyNeeded(question) {
  ask = question;
}

/** Asks for the key; false where the user gives none. */
export function askForKey(message) {
  asking ??= ask(message)
    .then((key) => {
      if (key !== null) sessionStorage.setItem(KEY, key);
      return key !== null;
    })
    .finally(() => {
      asking = null;
    });
  return asking;
}

/** The response, if its status is 2xx; raises ServerError, or AbortError where `options.signal` says so. */
export async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers };
    if (key !== null) headers.Authorization = `Bearer ${key}`;
    const response = await reach(new URL(path, ROOT), { ...options, headers });
    if (response.ok) return response;
    const problem = new ServerError(await words(response), response.status);
    if (response.status !== 401) throw problem;
    const another = sessionStorage.getItem(KEY) !== key; // given while this call was on its way
    if (!another && !(await askForKey(problem.message))) throw problem;
    options.signal?.throwIfAborted();
  }
}

async function reach(url, options) {
  try {
    return await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.", 0);
  }
}

async function words(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

/** The JSON values of a response's server-sent events, until [DONE]. Raises ServerError for an error event and for a stream that is cut. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await read(reader);
    if (done) throw new ServerError("The connection ended before the answer did.", 0);
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.message, response.status);
      yield event;
    }
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection to the server was lost.", 0);
  }
}
