// Ties the views together: which one shows, which models there are, and the key.

import { askForKey, call, onKeyNeeded } from "./api.js";
import { offerModels, startChat } from "./chat.js";
import { startWheel, stopWheel } from "./wheel.js";

const AGAIN_MS = 2000;

const find = (id) => document.getElementById(id);

function showView() {
  if (location.hash === "#content") return; // the skip link
  const wheel = location.hash === "#wheel";
  find("wheel-view").hidden = !wheel;
  find("chat-view").hidden = wheel;
  find("to-wheel").toggleAttribute("aria-current", wheel);
  find("to-chat").toggleAttribute("aria-current", !wheel);
  for (const link of document.querySelectorAll("nav [aria-current]")) link.setAttribute("aria-current", "page");
  document.title = wheel ? "Headrace: the wheel" : "Headrace";
  if (wheel && !document.hidden) startWheel(showState);
  else stopWheel();
}

/** The state as the server names it, and the first of its models. */
function showState(state, model = null) {
  if (find("state").textContent !== state) find("state").textContent = state;
  find("state").dataset.state = state;
  if (model !== null) find("model-name").textContent = model;
}

/** Fetches what is served; again and again until there is something. */
async function meet() {
  try {
    const models = (await (await call("v1/models")).json()).data.map((model) => model.id);
    offerModels(models);
    showState("ready", models[0]);
  } catch (error) {
    if (error.status === 401) {
      showState("needs a key");
      return;
    }
    showState(error.status === 503 ? "starting" : "not reached");
    setTimeout(meet, AGAIN_MS);
  }
}

/** The key that the user types, or null. */
function keyDialog(message) {
  const dialog = find("key-dialog");
  find("key-problem").textContent = message;
  find("change-key").hidden = false;
  find("key").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    let given = null;
    find("key-form").onsubmit = (event) => {
      event.preventDefault();
      given = find("key").value.trim() || null;
      dialog.close();
    };
    find("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => resolve(given);
  });
}

onKeyNeeded(keyDialog);
startChat();
find("change-key").addEventListener("click", async () => {
  if (await askForKey("The key that the server is called with from now on.")) {
    await meet();
    showView();
  }
});
addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", showView);
showView();
meet();
if (matchMedia("(pointer: fine)").matches && location.hash !== "#wheel") find("message").focus();
