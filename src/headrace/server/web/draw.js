// Pictures of numbers: the wheel, bars and lines. All in SVG or boxes, coloured by classes of wheel.css.

import { element } from "./markup.js";

const SVG = "http://www.w3.org/2000/svg";
const CENTRE = { x: 330, y: 190 };
const MOST_PADDLES = 24;
const MOST_DROPS = 12;
const CHART = { width: 300, height: 90, values: 120 };

function shape(name, attributes, className = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (className) made.setAttribute("class", className);
  return made;
}

/** The wheel: one paddle for each request that may run (or for several of them), a channel of drops that wait, a ring of the time. */
export class Wheel {
  #drops = [];
  #paddles = [];
  #arcs = {};
  #degrees = 0;

  constructor(svg, shares) {
    this.svg = svg;
    const { x, y } = CENTRE;
    svg.append(shape("path", { d: "M12 44H224" }, "channel"));
    svg.append(shape("path", { d: "M12 20H282" }, "channel"));
    for (let index = 0; index < MOST_DROPS; index++) {
      const drop = shape("circle", { cx: 226 - index * 18, cy: 32, r: 6 }, "drop");
      this.#drops.push(drop);
      svg.append(drop);
    }
    this.more = shape("text", { x: 12, y: 70 }, "small");
    svg.append(this.more);
    const ring = shape("g", { transform: `rotate(-90 ${x} ${y})` });
    for (const name of shares) {
      this.#arcs[name] = shape("circle", { cx: x, cy: y, r: 174, pathLength: 100, "stroke-dasharray": "0 100" }, `arc ${name}`);
      ring.append(this.#arcs[name]);
    }
    this.turning = shape("g", {}, "turning");
    this.turning.style.transformOrigin = `${x}px ${y}px`;
    this.turning.append(shape("circle", { cx: x, cy: y, r: 118 }, "rim"));
    this.count = shape("text", { x, y: y + 6 }, "count");
    this.of = shape("text", { x, y: y + 32 }, "small middle");
    svg.append(ring, this.turning, shape("circle", { cx: x, cy: y, r: 62 }, "hub"), this.count, this.of);
  }

  /** `steps` since the last time turn the wheel. */
  update({ running, waiting, most, shares, steps }) {
    const paddles = Math.min(most, MOST_PADDLES);
    if (paddles !== this.#paddles.length) this.#build(paddles);
    const filled = Math.ceil((running / most) * paddles);
    this.#paddles.forEach((paddle, index) => paddle.classList.toggle("filled", index < filled));
    this.#drops.forEach((drop, index) => drop.classList.toggle("filled", index < waiting));
    this.more.textContent = waiting === 0 ? "nothing waits" : `${waiting} waiting`;
    this.count.textContent = running;
    this.of.textContent = `of ${most} run`;
    this.#degrees += Math.min(170, steps * 6); // more than half a turn a second would look like turning back
    this.turning.style.transform = `rotate(${this.#degrees}deg)`;
    let start = 0;
    for (const [name, arc] of Object.entries(this.#arcs)) {
      const share = (shares?.[name] ?? 0) * 100;
      arc.setAttribute("stroke-dasharray", `${share} ${100 - share}`);
      arc.setAttribute("stroke-dashoffset", -start);
      start += share;
    }
  }

  #build(count) {
    const { x, y } = CENTRE;
    for (const old of this.turning.querySelectorAll(".spoke, .paddle")) old.remove();
    this.#paddles = [];
    const width = Math.min(26, (2 * Math.PI * 138) / count - 6);
    for (let index = 0; index < count; index++) {
      const turn = `rotate(${(360 / count) * index} ${x} ${y})`;
      const paddle = shape("rect", { x: x - width / 2, y: y - 156, width, height: 34, rx: 4, transform: turn }, "paddle");
      this.turning.append(shape("line", { x1: x, y1: y - 60, x2: x, y2: y - 118, transform: turn }, "spoke"), paddle);
      this.#paddles.push(paddle);
    }
  }
}

/** A bar of parts with its key: `parts` is a list of [class, name]. */
export class Bar {
  constructor(bar, key, parts) {
    this.bar = bar;
    this.parts = parts.map(([className, name]) => {
      const box = element("span", "", className);
      const value = element("strong");
      const row = element("li");
      row.append(element("span", "", `swatch ${className}`), `${name} `, value);
      bar.append(box);
      key.append(row);
      return { box, value };
    });
  }

  /** `shares` from 0 to 1 and `words` for each of them, in the order of the parts. */
  update(shares, words) {
    this.parts.forEach(({ box, value }, index) => {
      box.style.width = `${shares[index] * 100}%`;
      value.textContent = words[index];
    });
  }
}

/** Lines over the last two minutes, the newest value at the right. */
export class Chart {
  constructor(svg, key, lines) {
    this.lines = lines.map(([className, name]) => {
      const line = shape("polyline", { points: "" }, `line ${className}`);
      const value = element("strong");
      const row = element("li");
      row.append(element("span", "", `swatch ${className}`), `${name} `, value);
      svg.append(line);
      key.append(row);
      return { line, value };
    });
    this.top = element("li", "", "hint");
    key.append(this.top);
  }

  update(series, words, format) {
    const top = Math.max(...series.flat(), 1);
    this.lines.forEach(({ line, value }, index) => {
      const values = series[index].slice(-CHART.values);
      const place = (one, at) => {
        const left = CHART.width - ((values.length - 1 - at) * CHART.width) / (CHART.values - 1);
        return `${left.toFixed(1)},${(CHART.height - 3 - (one / top) * (CHART.height - 6)).toFixed(1)}`;
      };
      line.setAttribute("points", values.map(place).join(" "));
      value.textContent = words[index];
    });
    this.top.textContent = `two minutes, top ${format(top)}`;
  }
}
