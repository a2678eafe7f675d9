// The live view. Asks /v1/status once a second while it is to be seen.

import { call } from "./api.js";
import { Bar, Chart, Wheel } from "./draw.js";
import { element } from "./markup.js";
import { History, SHARES } from "./rates.js";

const EVERY_MS = 1000;
const BLOCKS = ["used", "cached", "free"];

const find = (id) => document.getElementById(id);

let parts = null; // made when the view is first seen
let session = 0; // which start the loop belongs to; 0: it does not run
let starts = 0;

export function startWheel(showState) {
  if (session) return;
  parts ??= {
    history: new History(),
    lastSteps: null,
    lastRemarks: "",
    wheel: new Wheel(find("picture"), SHARES),
    time: new Bar(find("time-bar"), find("time-key"), [["runner", "Runner"], ["around", "Around steps"], ["idle", "Idle"]]),
    blocks: new Bar(find("kv-bar"), find("kv-key"), [["runner", "Used"], ["around", "Cached"], ["idle", "Free"]]),
    tokens: new Chart(find("tokens-chart"), find("tokens-key"), [["runner", "Out"], ["around", "In"]]),
    requests: new Chart(find("requests-chart"), find("requests-key"), [["runner", "Running"], ["around", "Waiting"]]),
  };
  session = ++starts;
  loop(session, showState);
}

export function stopWheel() {
  session = 0;
}

async function loop(mine, showState) {
  while (session === mine) {
    const begun = performance.now();
    try {
      const status = await (await call("v1/status")).json();
      if (session !== mine) return;
      say("");
      showState(status.state, status.model);
      show(status);
    } catch (error) {
      if (session !== mine) return;
      say(error.message);
      if (error.status === 401) {
        session = 0; // nothing will change until the user gives a key
        return;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, Math.max(100, EVERY_MS - (performance.now() - begun))));
  }
}

function say(message) {
  if (find("wheel-problem").textContent !== message) find("wheel-problem").textContent = message;
  find("wheel-problem").hidden = !message;
}

function show(status) {
  const { history } = parts;
  history.add(status);
  if (!status.engine) {
    say(`The engine has computed nothing yet: ${status.state}.`);
    return;
  }
  const engine = status.engine;
  const recent = history.recent();
  const blocks = engine.kv_blocks;
  const shares = SHARES.map((name) => recent.shares?.[name] ?? 0);
  const steps = parts.lastSteps === null ? 0 : Math.max(0, engine.steps_total - parts.lastSteps);
  parts.lastSteps = engine.steps_total;
  const waiting = engine.waiting + engine.swapped;
  parts.wheel.update({ running: engine.running, waiting, most: status.max_num_seqs, shares: recent.shares, steps });
  parts.time.update(shares, shares.map((share) => (recent.shares ? percent(share) : "\u2013")));
  parts.blocks.update(BLOCKS.map((name) => blocks[name] / blocks.total), BLOCKS.map((name) => count(blocks[name])));
  const tokens = [history.rates("generation_tokens_total"), history.rates("prompt_tokens_total")];
  parts.tokens.update(tokens, [rate(recent.answerRate), rate(recent.promptRate)], rate);
  parts.requests.update([history.values("running"), history.values("waiting")], [count(engine.running), count(engine.waiting)], count);
  const figures = [
    ["Tokens out", rate(recent.answerRate)],
    ["Tokens in", rate(recent.promptRate)],
    ["Step", duration(recent.stepSeconds)],
    ["First token", duration(recent.firstTokenSeconds)],
    ["Prompt tokens cached", recent.hitShare === null ? "\u2013" : percent(recent.hitShare)],
    ["Preemptions", count(engine.preemptions_total)],
  ];
  fill(find("figures"), figures, (name, value) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", value));
    return pair;
  });
  const rows = [
    ["State", status.state],
    ["Requests running", `${count(engine.running)} of ${count(status.max_num_seqs)}`],
    ["Requests waiting", count(engine.waiting)],
    ["Requests swapped out", count(engine.swapped)],
    ...SHARES.map((name, index) => [`Time: ${{ runner: "runner", around: "around steps", idle: "idle" }[name]}`, percent(shares[index])]),
    ...Object.keys(engine.work_seconds_total).map((kind) => [`Work: ${kind}`, recent.work ? percent(recent.work[kind]) : "\u2013"]),
    ...BLOCKS.map((name) => [`KV blocks ${name}`, `${count(blocks[name])} of ${count(blocks.total)}`]),
    ...figures,
    ["Tokens computed again", count(engine.recomputed_tokens_total)],
    ["Steps so far", count(engine.steps_total)],
    ["Engine restarts", count(status.engine_restarts_total)],
  ];
  sayRemarks(engine.remarks.map((remark) => remark.text));
  fill(find("rows"), rows, (name, value) => {
    const row = element("tr");
    const head = element("th", name);
    head.scope = "row";
    row.append(head, element("td", value));
    return row;
  });
}

/** What the server finds wrong with where its time went since it started. */
function sayRemarks(texts) {
  const list = find("remarks");
  if (texts.join("\n") === parts.lastRemarks) return;
  parts.lastRemarks = texts.join("\n");
  list.replaceChildren(...texts.map((text) => element("li", text)));
  list.hidden = !texts.length;
}

/** Pairs as elements: made once, afterwards only values change, so that a reader's place is kept. */
function fill(parent, pairs, make) {
  if (parent.children.length !== pairs.length) {
    parent.replaceChildren(...pairs.map(([name, value]) => make(name, value)));
    return;
  }
  pairs.forEach(([, value], index) => {
    const shown = parent.children[index].lastChild;
    if (shown.textContent !== value) shown.textContent = value;
  });
}

const count = (value) => Math.round(value).toLocaleString("en");
const percent = (share) => `${(share * 100).toFixed(share < 0.0995 ? 1 : 0)} %`;
const rate = (value) => (value === null ? "\u2013" : `${value.toFixed(value < 100 ? 1 : 0)}/s`);

function duration(seconds) {
  if (seconds === null) return "\u2013";
  return seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`;
}
