// What successive answers of /v1/status say about the time between them.

const KEPT = 121; // answers: two minutes
const RECENT = 5; // seconds, for rates
export const SHARES = ["runner", "around", "idle"];

export class History {
  #answers = []; // those with an engine, one after the other

  /** Keeps an answer; forgets all earlier ones when the engine was started again. */
  add(status) {
    const last = this.#answers.at(-1);
    if (last && (!status.engine || status.engine_restarts_total !== last.engine_restarts_total || status.engine.at < last.engine.at)) {
      this.#answers = [];
    }
    if (!status.engine) return;
    this.#answers.push(status);
    if (this.#answers.length > KEPT) this.#answers.shift();
  }

  /** Rates, shares and means of the last seconds; null where nothing can be said yet. */
  recent() {
    const last = this.#answers.at(-1);
    const first = last && this.#answers.find((answer) => last.engine.at - answer.engine.at <= RECENT + 0.5);
    const seconds = first ? last.engine.at - first.engine.at : 0;
    const grown = (name) => last.engine[name] - first.engine[name];
    if (seconds <= 0) return { shares: null, work: null, promptRate: null, answerRate: null, stepSeconds: null, ...this.#whole() };
    const runner = Math.min(1, grown("runner_seconds_total") / seconds);
    const idle = Math.min(1 - runner, Math.max(0, grown("idle_seconds_total") / seconds));
    return {
      shares: { runner, around: 1 - runner - idle, idle },
      work: this.#work(first.engine.work_seconds_total, last.engine.work_seconds_total),
      promptRate: grown("prompt_tokens_total") / seconds,
      answerRate: grown("generation_tokens_total") / seconds,
      stepSeconds: grown("steps_total") ? grown("runner_seconds_total") / grown("steps_total") : null,
      ...this.#whole(),
    };
  }

  /** What the time between two answers went into: a share for each kind; null where nothing has ended in it. */
  #work(before, after) {
    const grown = Object.entries(after).map(([kind, seconds]) => [kind, seconds - before[kind]]);
    const all = grown.reduce((sum, [, seconds]) => sum + seconds, 0);
    return all > 0 ? Object.fromEntries(grown.map(([kind, seconds]) => [kind, seconds / all])) : null;
  }

  /** Over all that is kept. */
  #whole() {
    const [first, last] = [this.#answers[0], this.#answers.at(-1)];
    if (!last) return { firstTokenSeconds: null, hitShare: null };
    const tokens = last.first_tokens_total - first.first_tokens_total;
    const looked = last.engine.prefix_query_tokens_total;
    return {
      firstTokenSeconds: tokens ? (last.first_token_seconds_total - first.first_token_seconds_total) / tokens : null,
      hitShare: looked ? last.engine.prefix_hit_tokens_total / looked : null,
    };
  }

  /** One value a pair of successive answers: how fast a total grew. */
  rates(name) {
    return this.#answers.slice(1).map((answer, index) => {
      const before = this.#answers[index].engine;
      const seconds = answer.engine.at - before.at;
      return seconds > 0 ? (answer.engine[name] - before[name]) / seconds : 0;
    });
  }

  /** One value an answer. */
  values(name) {
    return this.#answers.map((answer) => answer.engine[name]);
  }
}
