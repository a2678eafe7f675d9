// Reads an answer to screen readers while it grows: whole sentences every few seconds, instead of each token.

import { element } from "./markup.js";

const PAUSE_MS = 3000;
const KEPT_MS = 10000; // after the end; the text itself stays in the conversation

export class Speaker {
  #region;
  #text = "";
  #spoken = 0; // characters
  #timer = null;

  constructor(region) {
    this.#region = region;
  }

  begin() {
    clearTimeout(this.#timer);
    this.#text = "";
    this.#spoken = 0;
    this.#region.replaceChildren(element("p", "The model answers."));
    this.#timer = setTimeout(() => this.#sentences(), PAUSE_MS);
  }

  grow(text) {
    this.#text += text;
  }

  end(word) {
    clearTimeout(this.#timer);
    this.#say(this.#text.length);
    this.#region.append(element("p", word));
    this.#timer = setTimeout(() => this.#region.replaceChildren(), KEPT_MS);
  }

  #sentences() {
    const found = [...this.#text.slice(this.#spoken).matchAll(/[.!?:]\s|\n/g)].pop();
    if (found) this.#say(this.#spoken + found.index + 1);
    this.#timer = setTimeout(() => this.#sentences(), PAUSE_MS);
  }

  #say(end) {
    const text = this.#text.slice(this.#spoken, end).trim();
    this.#spoken = end;
    if (text) this.#region.append(element("p", text));
  }
}
