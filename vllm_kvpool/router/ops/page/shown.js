// What the router says, written into the document: as text only, since the address forbids
// everything else (see HEADERS in admin_api.py).

import { byId, bytes, count, fill, make, say, seconds, short } from "./pieces.js";

const STATES = {
  inactive: ["rest", "No engine runs, or it sleeps."],
  loading_prefill: ["busy", "The engine is being loaded. It will compute prompts."],
  loading_decode: ["busy", "The engine is being loaded. It will decode."],
  loading_prefill_assigned: ["busy", "The engine is being loaded. Requests are assigned to it already."],
  prefill_assigned: ["prefill", "Computes the requests that were assigned to it while it was loaded, and gets no others."],
  prefill: ["prefill", "Computes prompts."],
  prefill_stealing: ["prefill", "Computes prompts. When idle, it takes requests that are assigned to a loading replica."],
  warming_prefill: ["busy", "A standby that is tested with one token before it computes prompts."],
  decode: ["decode", "Decodes."],
  warming_decode: ["busy", "A standby that is tested with one token before it decodes."],
  prefill_to_decode: ["drain", "Finishes its prompts, then decodes."],
  draining_prefill: ["drain", "Finishes its prompts and gets no new ones."],
  draining_decode: ["drain", "Finishes its answers and gets no new requests."],
  standby: ["rest", "Loaded, without work. It can serve at once."],
  failed: ["bad", "Does not answer. The router tries it again."],
  quarantined: ["bad", "Failed too often. The router tries it again after a longer pause."],
};

const GOALS = { hold: "drained by an administrator", remove: "to be removed" };

const kindOf = (state) => STATES[state]?.[0] ?? "rest";
const stateName = (state) => state.replaceAll("_", " ");

// At a glance

/** How much a count has grown by second since the state before. */
function growth(before, now, read) {
  if (before === null || now.now <= before.now) return 0;
  return Math.max(0, read(now) - read(before)) / (now.now - before.now);
}

function showGlance(before, state) {
  const sum = (read) => state.replicas.reduce((total, each) => total + read(each), 0);
  const refused = (each) => Object.values(each.refusals).reduce((total, many) => total + many, 0);
  const waiting = ({ requests, tokens }) => `${count(requests)}, ${short(tokens)} tokens`;
  const ttft = state.ttft;
  showNumbers(byId("glance"), [
    ["prompts waiting", waiting(state.queue)],
    ["awaiting decode", waiting(state.migration)],
    ["first token", ttft ? `p50 ${seconds(ttft.p50)}, p99 ${seconds(ttft.p99)}` : "none yet"],
    ["arrivals", `${short(growth(before, state, (each) => each.counts.arrived))} /s, ${short(state.rates.asked_tokens_per_s)} tokens/s`],
    ["refused", `${short(growth(before, state, refused))} /s, ${count(refused(state))} so far`],
    ["computed", `${short(sum((each) => each.prompt_tokens_per_s))} tokens/s`],
    ["generated", `${short(sum((each) => each.generated_tokens_per_s))} tokens/s`],
    ["from the pool", `${bytes(sum((each) => each.bytes_in_per_s))}/s`],
    ["to the pool", `${bytes(sum((each) => each.bytes_out_per_s))}/s`],
  ]);
}

// Replicas

class Row {
  constructor() {
    this.element = byId("row").content.firstElementChild.cloneNode(true);
    const [id, state, load, ...numbers] = this.element.cells;
    [this.id, this.place] = id.children;
    [, this.name, this.lock, this.stale, this.mismatch] = state.firstElementChild.children;
    this.since = state.lastElementChild;
    [this.bar, this.blocks] = load.children;
    [this.committed, this.used] = this.bar.children;
    [this.given, this.engine, this.tokens, this.into, this.out] = numbers.map((cell) => new Numbers(cell));
  }

  tell(replica, now) {
    this.element.className = `kind-${kindOf(replica.state)}${replica.is_stale ? " stale" : ""}`;
    this.element.dataset.id = replica.id;
    say(this.id, replica.id);
    say(this.place, replica.url === replica.id ? "" : replica.url);
    say(this.name, stateName(replica.state));
    this.name.title = STATES[replica.state]?.[1] ?? "";
    this.lock.hidden = !replica.locked;
    this.lock.title = replica.lock_why;
    this.stale.hidden = !replica.is_stale;
    this.mismatch.hidden = !replica.mismatch;
    this.mismatch.title = replica.problem;
    say(this.since, this.notes(replica, now));
    this.tellLoad(replica);
    const given = [[replica.prefills, "prompt"], [replica.decodes, "answer"]].map(([number, what]) => several(number, what));
    this.given.tell([...given, replica.bound && `${replica.bound} bound`], [replica.tokens_in && `${short(replica.tokens_in)} tokens to compute`]);
    this.engine.tell([replica.running && `${replica.running} running`], [replica.waiting && `${replica.waiting} waiting`]);
    const [computed, generated] = [replica.prompt_tokens_per_s, replica.generated_tokens_per_s];
    this.tokens.tell([computed && `${short(computed)} computed`, generated && `${short(generated)} generated`], []);
    const flow = (perSecond) => [perSecond > 0 && `${bytes(perSecond)}/s`];
    this.into.tell(flow(replica.bytes_in_per_s), []);
    this.out.tell(flow(replica.bytes_out_per_s), []);
  }

  notes(replica, now) {
    const notes = [`for ${seconds(Math.max(0, now - replica.since))}`];
    if (replica.state === "standby" || replica.state === "inactive") notes.push(`last ${replica.role}`);
    if (GOALS[replica.goal]) notes.push(GOALS[replica.goal]);
    else if (kindOf(replica.state) === "drain" && replica.goal !== "standby") notes.push(`then ${replica.goal}`);
    if (replica.retry_in_s !== null) notes.push(`tried again in ${seconds(replica.retry_in_s)}`);
    if (replica.locked) notes.push(replica.lock_why);
    if (replica.problem) notes.push(replica.problem);
    return notes.join(", ");
  }

  tellLoad(replica) {
    const total = replica.total_blocks;
    const share = (blocks) => (total ? Math.min(1, blocks / total) : 0);
    this.used.style.width = `${100 * share(replica.used_blocks)}%`;
    this.committed.style.width = `${100 * share(replica.committed_blocks)}%`;
    const text = total
      ? `${count(replica.used_blocks)} used, ${count(replica.committed_blocks)} committed of ${count(total)}`
      : "not known yet";
    say(this.blocks, text);
    this.bar.setAttribute("aria-label", `Blocks of ${replica.id}`);
    this.bar.setAttribute("aria-valuemax", String(total || 1));
    this.bar.setAttribute("aria-valuenow", String(Math.min(replica.used_blocks, total)));
    this.bar.setAttribute("aria-valuetext", text);
  }
}

const several = (number, what) => (number ? `${count(number)} ${what}${number === 1 ? "" : "s"}` : "");

/** A cell that says what there is, and nothing of what there is not. */
class Numbers {
  constructor(cell) {
    [this.first, this.second] = cell.children;
  }

  tell(first, second) {
    const line = first.filter(Boolean).join(", ");
    say(this.first, line || "–");
    this.first.classList.toggle("none", !line);
    say(this.second, second.filter(Boolean).join(", "));
  }
}

const rows = new Map();

function showReplicas(state) {
  const known = new Set(state.replicas.map((replica) => replica.id));
  for (const [id, row] of rows) {
    if (!known.has(id)) { row.element.remove(); rows.delete(id); }
  }
  for (const replica of state.replicas) {
    let row = rows.get(replica.id);
    if (row === undefined) {
      row = new Row();
      rows.set(replica.id, row);
      byId("rows").append(row.element);
    }
    row.tell(replica, state.now);
  }
  byId("nobody").hidden = state.replicas.length > 0;
  byId("replicas").hidden = state.replicas.length === 0;
}

// Plan, transitions, numbers

const MODES = { manual: "manual", dry_run: "dry run", automatic: "automatic" };

function showPlan(state) {
  const plan = state.plan;
  say(byId("mode"), MODES[plan.mode] ?? plan.mode);
  say(byId("planned"), plan.at === null ? "" : `made ${seconds(Math.max(0, state.now - plan.at))} ago`);
  const wanted = [["prefill", plan.prefill], ["decode", plan.decode]];
  fill(byId("wanted"), wanted, makeWanted, (line, [role, numbers]) => {
    say(line.firstElementChild, role);
    say(line.lastElementChild, `${numbers.have} → ${numbers.wanted}`);
    line.className = numbers.have === numbers.wanted ? "" : "changes";
  });
  byId("held").hidden = !plan.held;
  say(byId("held"), plan.held);
  fill(byId("steps"), plan.steps, () => make("li"), say);
  byId("no-steps").hidden = plan.steps.length > 0;
  const lines = plan.why.split("\n").filter((line) => line && line !== plan.held);
  if (plan.flip_to) lines.push(`one of each is meant as a flip to ${plan.flip_to}`);
  fill(byId("why"), lines, () => make("li"), say);
}

function makeWanted() {
  const line = make("p");
  line.append(make("span"), make("b"));
  return line;
}

function showTransitions(state) {
  const newestFirst = [...state.transitions].reverse();
  fill(byId("transitions"), newestFirst, makeTransition, (row, each) => {
    const [when, replica, way, why] = row.children;
    say(when, `${seconds(Math.max(0, state.now - each.at))} ago`);
    say(replica, each.replica);
    say(way.firstElementChild, `${stateName(each.before)} → ${stateName(each.after)}`);
    way.className = `kind-${kindOf(each.after)}`;
    say(way.lastElementChild, each.cause);
    say(why, each.why);
  });
}

function makeTransition() {
  const row = make("tr");
  const way = make("td");
  way.append(make("span", "state"), make("small"));
  row.append(make("td", "faint"), make("td"), way, make("td"));
  return row;
}

function showNumbers(list, numbers) {
  const makePair = () => {
    const pair = make("div");
    pair.append(make("dt"), make("dd"));
    return pair;
  };
  fill(list, numbers, makePair, (pair, [name, value]) => {
    say(pair.firstElementChild, name);
    say(pair.lastElementChild, value);
  });
}

const UNITS = [
  ["_tokens_per_s", (value) => `${short(value)} tokens/s`],
  ["_s_per_token", (value) => `${short(value * 1e6)} µs/token`],
  ["_per_request", (value) => `${short(value)} per request`],
  ["_per_byte", (value) => `${value.toFixed(2)} per byte`],
  ["_s", seconds],
];

function showCounts(state) {
  const counts = Object.entries(state.counts).map(([name, many]) => [name.replaceAll("_", " "), count(many)]);
  const refusals = Object.entries(state.refusals).map(([status, many]) => [`refused with ${status}`, count(many)]);
  const prompts = Object.entries(state.prompts).filter(([, many]) => many).map(([path, many]) => [`prompts ${path.replaceAll("_", " ")}`, count(many)]);
  showNumbers(byId("counts"), [["in flight", count(state.in_flight)], ...counts, ...refusals, ...prompts]);
  const { learned, ...seen } = state.rates;
  showNumbers(byId("rates"), Object.entries({ ...learned, ...seen }).map(([name, value]) => {
    const [suffix, text] = UNITS.find(([end]) => name.endsWith(end));
    const shown = value === null ? "not measured yet" : text(value);
    return [name.slice(0, -suffix.length).replaceAll("_", " "), shown];
  }));
}

function showFlags(state) {
  const flags = [];
  if (!state.pool_is_up) flags.push(["bad", "pool is down"]);
  if (state.is_collapsed) flags.push(["warn", "prompts are computed where they are decoded"]);
  const locked = state.replicas.filter((replica) => replica.locked).length;
  if (locked) flags.push(["lock", `${locked} locked`]);
  fill(byId("flags"), flags, () => make("li"), (flag, [kind, text]) => {
    flag.className = `badge ${kind}`;
    say(flag, text);
  });
}

// All of it

let last = null;

/** Write a state down. */
export function show(state) {
  showFlags(state);
  showGlance(last, state);
  showReplicas(state);
  showPlan(state);
  showTransitions(state);
  showCounts(state);
  last = state;
}

/** Growth is not told from what was before. */
export function forget() {
  last = null;
}
