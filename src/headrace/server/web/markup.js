// Model text as nodes. Text only ever becomes text nodes; of Markdown, fences and inline code are shown, the rest stays as it was written.

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`\n]*$/;

/** A new element with text and, where given, a class. */
export function element(name, text = "", className = "") {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (className) made.className = className;
  return made;
}

/** The nodes that show `text`; a fence without its end runs to the end of the text. */
export function render(text) {
  const fragment = document.createDocumentFragment();
  let prose = [];
  let code = null; // { fence, language, lines } inside of a block
  const endProse = () => {
    const joined = prose.join("\n").replace(/^\n+|\s+$/g, "");
    if (joined) fragment.append(paragraph(joined));
    prose = [];
  };
  for (const line of text.split("\n")) {
    const fence = FENCE.exec(line);
    if (code === null && fence) {
      endProse();
      code = { fence: fence[1], language: fence[2], lines: [] };
    } else if (code !== null && fence && !fence[2] && fence[1].startsWith(code.fence)) {
      fragment.append(block(code));
      code = null;
    } else {
      (code === null ? prose : code.lines).push(line);
    }
  }
  if (code !== null) fragment.append(block(code));
  endProse();
  return fragment;
}

function paragraph(text) {
  const shown = element("p", "", "prose");
  text.split(/(`[^`\n]+`)/).forEach((part, index) => {
    shown.append(index % 2 ? element("code", part.slice(1, -1)) : part);
  });
  return shown;
}

function block({ language, lines }) {
  const shown = element("pre");
  shown.tabIndex = 0; // long lines are scrolled by keyboard too
  shown.setAttribute("role", "group");
  shown.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
  shown.append(element("code", lines.join("\n")));
  return shown;
}
