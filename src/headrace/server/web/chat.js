// The conversation: one answer at a time, streamed from /v1/chat/completions, stopped by hanging up.

import { call, events } from "./api.js";
import { element, render } from "./markup.js";
import { Speaker } from "./speak.js";

const NUMBERS = { temperature: "temperature", "top-p": "top_p", "top-k": "top_k", "max-tokens": "max_tokens", seed: "seed" };
const NEAR_END = 80; // pixels; who has scrolled further up than this is reading

const find = (id) => document.getElementById(id);

let turns = []; // { role, content } as the API takes them
let running = null; // the AbortController of the answer that is being made
let speaker = null;

export function startChat() {
  speaker = new Speaker(find("spoken"));
  find("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  find("settings-form").addEventListener("submit", (event) => event.preventDefault());
  find("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  find("chat-view").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) stop();
  });
  find("stop").addEventListener("click", stop);
  find("fresh").addEventListener("click", () => {
    running?.abort();
    turns = [];
    find("conversation").replaceChildren(find("welcome"));
    find("welcome").hidden = false;
    say("");
    find("message").focus();
  });
  if (matchMedia("(min-width: 60rem)").matches) find("settings").open = true;
}

/** The models that may be asked. */
export function offerModels(names) {
  find("model").replaceChildren(...names.map((name) => element("option", name)));
}

function stop() {
  running?.abort();
  find("message").focus();
}

/** Shows a problem; none where `message` is empty. */
function say(message) {
  find("problem").textContent = message;
  find("problem").hidden = !message;
}

/** The fields of the request that the settings stand for; null where one of them is no number. */
function settings() {
  const fields = {};
  for (const [id, name] of Object.entries(NUMBERS)) {
    const input = find(id);
    if (input.validity.badInput) {
      find("settings").open = true;
      input.reportValidity();
      return null;
    }
    if (input.value !== "") fields[name] = Number(input.value);
  }
  if (find("model").value) fields.model = find("model").value;
  return fields;
}

async function send() {
  const text = find("message").value;
  const fields = settings();
  if (running || !text.trim() || fields === null) return;
  const system = find("system").value.trim();
  const history = turns;
  turns = [...history, { role: "user", content: text }];
  const messages = system ? [{ role: "system", content: system }, ...turns] : turns;
  const controller = new AbortController();
  find("message").value = "";
  say("");
  const asked = addTurn("user", "You");
  asked.body.append(element("p", text, "prose"));
  const answer = new Answer(addTurn("assistant", "Model"));
  find("conversation").scrollTop = find("conversation").scrollHeight;
  busy(controller);
  speaker.begin();
  let problem = null;
  try {
    await answer.stream({ messages, ...fields }, controller.signal);
  } catch (error) {
    problem = error;
  }
  const stopped = controller.signal.aborted;
  if (running === controller) busy(null);
  speaker.end(stopped ? "Stopped." : problem ? "The answer failed." : "End of the answer.");
  if (!answer.turn.article.isConnected) return; // a new conversation has begun
  answer.finish(stopped);
  if (answer.text || answer.finishReason) {
    turns = [...turns, { role: "assistant", content: answer.text }];
  } else {
    turns = history; // nothing came: the question can be sent again
    asked.article.remove();
    answer.turn.article.remove();
    find("welcome").hidden = turns.length > 0;
    if (!find("message").value) find("message").value = text;
  }
  if (problem && !stopped) say(problem.message);
}

function busy(controller) {
  const focused = document.activeElement;
  running = controller;
  find("stop").hidden = controller === null;
  find("send").hidden = controller !== null;
  if (focused === find("stop") || focused === find("send")) find("message").focus();
}

function addTurn(role, name) {
  const article = element("article", "", role);
  const heading = element("h2", name);
  const body = element("div", "", "body");
  article.append(heading, body);
  find("welcome").hidden = true;
  find("conversation").append(article);
  return { article, body };
}

/** One answer while it grows. */
class Answer {
  text = "";
  finishReason = null;
  #reasoning = "";
  #usage = null;
  #asked = performance.now();
  #first = null; // { at, tokens } of the first piece
  #last = 0;
  #frame = null;

  constructor(turn) {
    this.turn = turn;
    turn.article.setAttribute("aria-busy", "true");
    this.thoughts = element("details", "", "thoughts");
    this.thoughts.hidden = true;
    this.thoughts.append(element("summary", "Reasoning"), element("p", "", "prose"));
    this.content = element("div", "", "content");
    turn.body.append(this.thoughts, this.content);
  }

  async stream(fields, signal) {
    const body = { ...fields, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
    const response = await call("v1/chat/completions", options);
    for await (const event of events(response)) this.#take(event);
  }

  #take(event) {
    this.#usage = event.usage ?? this.#usage;
    const choice = event.choices[0];
    if (!choice) return;
    const { content, reasoning_content: thought } = choice.delta;
    this.finishReason = choice.finish_reason ?? this.finishReason;
    if (!content && !thought) return;
    this.#last = performance.now();
    this.#first ??= { at: this.#last, tokens: this.#usage?.completion_tokens ?? 1 };
    this.text += content ?? "";
    this.#reasoning += thought ?? "";
    speaker.grow(content ?? "");
    this.#frame ??= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#frame = null;
    const log = find("conversation");
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
    this.thoughts.hidden = !this.#reasoning;
    this.thoughts.lastChild.textContent = this.#reasoning.trim();
    this.content.replaceChildren(render(this.text));
    if (follow) log.scrollTop = log.scrollHeight;
  }

  finish(stopped) {
    if (this.#frame !== null) cancelAnimationFrame(this.#frame);
    this.#draw();
    this.turn.article.removeAttribute("aria-busy");
    if (!this.#usage) return;
    this.turn.body.append(element("p", this.#figures(stopped).join(" \u00b7 "), "figures"));
    this.#draw();
  }

  #figures(stopped) {
    const { prompt_tokens: asked, completion_tokens: made, prompt_tokens_details: details } = this.#usage;
    const shown = [];
    if (this.#first) {
      shown.push(`first token ${((this.#first.at - this.#asked) / 1000).toFixed(2)} s`);
      const seconds = (this.#last - this.#first.at) / 1000;
      if (seconds > 0) shown.push(`${((made - this.#first.tokens) / seconds).toFixed(1)} tokens/s`);
    }
    shown.push(`${made} tokens`, `prompt ${asked}, cached ${details?.cached_tokens ?? 0}`);
    if (stopped) shown.push("stopped");
    else if (this.finishReason === "length") shown.push("cut at the token limit");
    return shown;
  }
}
