// The status page: it asks GET /state once a second, with the token that it was given.

import { byId, say, seconds } from "./pieces.js";
import { forget, show } from "./shown.js";

const POLL_MS = 1000;
const TIMEOUT_MS = 5000;
const TOKEN_KEY = "kvpool-token";

// Asking

let heardAt = null;
let timer = 0;
let asking = 0; // which round of asking is the present one: answers to earlier ones come too late

function heard() {
  heardAt = performance.now();
  byId("link").className = "pill live";
  say(byId("link"), "live");
  byId("alarm").hidden = true;
  byId("main").classList.remove("stale-page");
}

function lost(why) {
  byId("link").className = "pill lost";
  say(byId("link"), "cannot be reached");
  const ago = heardAt === null ? "" : ` Below is what it said ${seconds((performance.now() - heardAt) / 1000)} ago.`;
  say(byId("alarm"), `The router cannot be reached: ${why}.${ago} Trying again every second.`);
  byId("alarm").hidden = false;
  byId("main").classList.add("stale-page");
}

async function ask() {
  const round = asking;
  const response = await fetch("/state", {
    headers: { Authorization: `Bearer ${sessionStorage.getItem(TOKEN_KEY)}` },
    signal: AbortSignal.timeout(TIMEOUT_MS),
    cache: "no-store",
  });
  const answer = await response.json();
  if (round !== asking) return false;
  if (response.status === 401) {
    logOut(answer.error);
    return false;
  }
  if (!response.ok) throw new Error(answer.error ?? `it answers ${response.status}`);
  heard();
  show(answer);
  byId("main").hidden = false;
  return true;
}

async function poll() {
  const round = asking;
  try {
    if (!await ask()) return;
  } catch (error) {
    if (round !== asking) return;
    // What fetch itself throws, and each browser words in its own way.
    const known = { TimeoutError: "no answer in time", TypeError: "no connection" };
    lost(known[error.name] ?? error.message);
  }
  timer = setTimeout(poll, POLL_MS);
}

// The token

function logIn(token) {
  if (!/^[\x21-\x7e]+$/.test(token)) {
    logOut("a token has letters, digits and signs only; this one has something else");
    return;
  }
  sessionStorage.setItem(TOKEN_KEY, token);
  asking += 1;
  clearTimeout(timer);
  byId("login").hidden = true;
  byId("wrong").hidden = true;
  byId("forget").hidden = false;
  poll();
}

function logOut(why) {
  sessionStorage.removeItem(TOKEN_KEY);
  asking += 1;
  clearTimeout(timer);
  forget();
  byId("alarm").hidden = true;
  byId("main").hidden = true;
  byId("forget").hidden = true;
  byId("login").hidden = false;
  byId("wrong").hidden = !why;
  say(byId("wrong"), why);
  byId("link").className = "pill";
  say(byId("link"), "needs the token");
  byId("token").focus();
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  const token = byId("token").value.trim();
  byId("token").value = "";
  logIn(token);
});
byId("forget").addEventListener("click", () => logOut(""));

function start() {
  const given = /^#token=(.*)$/.exec(location.hash);
  // At once: it is not to stay in the address or in the history.
  if (given) history.replaceState(null, "", location.pathname + location.search);
  const token = given ? decodeURIComponent(given[1]) : sessionStorage.getItem(TOKEN_KEY);
  if (token) logIn(token);
  else logOut("");
}

addEventListener("hashchange", start);
start();
