// SPDX-License-Identifier: Apache-2.0
// The page: asks for the state each second while it is looked at, and shows it.

import { clock, html, rate, rates, timeline, topology } from "/draw.js";

const $ = (id) => document.getElementById(id);
const SPAN_S = 120,
  EVERY_MS = 1000,
  PAGE = 100,
  LINES = 8;

const history = new Map(); // NIC: [time_us, tx_bytes + rx_bytes, bit/s]
let chosen = null,
  from = 0,
  shape = "",
  draw = null,
  last = null,
  timer = 0;
let token = sessionStorage.getItem("token") ?? "";

// In the fragment it is sent to nobody; from there it goes where other pages cannot read it.
if (location.hash.startsWith("#token=")) {
  keep(decodeURIComponent(location.hash.slice(7)));
  window.history.replaceState(null, "", location.pathname);
}

function keep(value) {
  token = value.trim();
  sessionStorage.setItem("token", token);
}

async function ask(path, body) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    body,
    signal: AbortSignal.timeout(15000),
  });
  const text = await answer.text();
  if (!answer.ok)
    throw new Error(answer.status === 401 ? "the token is missing or wrong" : text.trim());
  return JSON.parse(text);
}

function remember(state) {
  for (const nic of state.nics) {
    const all = history.get(nic.nic) ?? [];
    const now = [state.time_us, nic.tx_bytes + nic.rx_bytes];
    const before = all.at(-1);
    const us = before ? now[0] - before[0] : 0;
    if (before && us <= 0) continue;
    const bps = before ? Math.max(0, ((now[1] - before[1]) * 8e6) / us) : 0;
    all.push([...now, bps]);
    while (all.length && now[0] - all[0][0] > SPAN_S * 1.1e6) all.shift();
    history.set(nic.nic, all);
  }
  for (const name of history.keys())
    if (!state.nics.some((n) => n.nic === name)) history.delete(name);
}

const rateOf = (nic) => history.get(nic)?.at(-1)?.[2] ?? 0;

function showHead(state) {
  const { health, counts } = state;
  const verdict = $("verdict");
  const since = health.since_unix_s ? `, since ${clock(health.since_unix_s * 1e6)}` : "";
  const left =
    health.capacity < 1 ? `, ${Math.round(health.capacity * 100)} % of capacity left` : "";
  const words = health.verdict + left + since;
  // What is said again is read out again.
  if (verdict.textContent !== words) verdict.textContent = words;
  verdict.className = health.verdict.split(",")[0];
  $("summary").textContent =
    `${counted(state.processes.length, "process", "processes")}, ` +
    `${counted(counts.all, "queue pair", "queue pairs")}, ` +
    `${counts.protected} protected · ${state.runtime}`;
  document.title = `${health.verdict} – Unbroken`;
}

/** So many of something. */
const counted = (n, one, many) => `${n} ${n === 1 ? one : many}`;

function cell(words, kind = "") {
  return html("td", kind ? { class: kind } : {}, words);
}

/** The rows of a table; each cell has the words of its column, for a narrow screen. */
function fill(table, rows) {
  const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent);
  for (const row of rows) {
    row.setAttribute("role", "row");
    [...row.cells].forEach((part, n) => {
      part.dataset.label = heads[n];
      part.setAttribute("role", n ? "cell" : "rowheader");
    });
  }
  table.setAttribute("role", "table");
  table.tBodies[0].setAttribute("role", "rowgroup");
  table.tBodies[0].replaceChildren(...rows);
}

function showNics(state) {
  fill(
    $("nics"),
    state.nics.map((nic) =>
      html(
        "tr",
        {},
        html("th", { scope: "row" }, nic.nic),
        cell(
          nic.state,
          nic.is_out && nic.state !== "active, drained" ? "bad" : nic.is_impaired ? "warn" : "good",
        ),
        cell(bytes(nic.tx_bytes), "number"),
        cell(bytes(nic.rx_bytes), "number"),
        cell(String(nic.retransmits), "number"),
        cell(String(nic.drops), "number"),
        cell(nic.faults.join(", "), "bad"),
      ),
    ),
  );
}

function bytes(n) {
  const units = ["B", "KB", "MB", "GB", "TB", "PB"];
  let step = 0;
  while (n >= 1000 && step + 1 < units.length) {
    n /= 1000;
    step += 1;
  }
  return `${Number(n.toPrecision(3))} ${units[step]}`;
}

function showQps(state) {
  const { counts, qps } = state;
  const age = state.qps_age_us > 2e6 ? `; as of ${Math.round(state.qps_age_us / 1e6)} s ago` : "";
  $("qps-summary").textContent =
    `${counted(counts.all, "queue pair", "queue pairs")}: ${counts.protected} protected, ` +
    `${counts.pending} pending, ${counts.unprotected} not protected, ` +
    `${counts.displaced} not on their ` +
    `first path, ${counts.failed} failed${age}`;
  $("unprotected").replaceChildren(
    ...state.unprotected.map(([host, why, count]) =>
      html("li", { class: "warn" }, `${count} of host ${host} not protected: ${why}`),
    ),
  );
  fill(
    $("qps"),
    qps.map((qp) => {
      const [words, kind] =
        qp.state === "failed"
          ? [`failed: ${qp.why}`, "bad"]
          : qp.protected
            ? [
                qp.first_path ? `yes; first path ${qp.first_path}` : "yes",
                qp.first_path ? "warn" : "good",
              ]
            : qp.pending
              ? [`pending: ${qp.why}`, "warn"]
              : [`no: ${qp.why}`, "bad"];
      return html(
        "tr",
        {},
        html("th", { scope: "row" }, `0x${qp.qp.toString(16)}`),
        cell(`${qp.program} (${qp.pid})`),
        cell(qp.state),
        cell(qp.path || qp.primary),
        cell(qp.peer),
        cell(words, kind),
      );
    }),
  );
  $("qps-page").textContent = state.qps_listed
    ? `${from + 1} to ${Math.min(from + PAGE, state.qps_listed)} of ${state.qps_listed}`
    : "none";
  $("qps-back").disabled = from === 0;
  $("qps-on").disabled = from + PAGE >= state.qps_listed;
}

function showEvents(state) {
  timeline($("timeline"), state.events, state.wall_us);
  const newest = state.events.toReversed().slice(0, 60);
  $("events").replaceChildren(
    ...newest.map((event) => html("li", {}, html("time", {}, clock(event.wall_us)), event.words)),
  );
}

function showRates(state) {
  const peak = (all) => Math.max(...all.map((point) => point[2]));
  const busiest = [...history]
    .filter(([, all]) => all.length > 1 && peak(all) > 0)
    .sort((a, b) => peak(b[1]) - peak(a[1]))
    .slice(0, LINES)
    .sort(([a], [b]) => a.localeCompare(b));
  const lines = busiest.map(([name, all]) => [
    name,
    all.map(([us, , bps]) => [(state.time_us - us) / 1e6, bps]).filter(([ago]) => ago <= SPAN_S),
  ]);
  // The log knows what happened before the page was opened.
  const marks = state.events
    .filter((event) => ["fault", "device-fatal", "port-down"].includes(event.event))
    .map((event) => [(state.wall_us - event.wall_us) / 1e6, event.words])
    .filter(([ago]) => ago >= 0 && ago <= SPAN_S);
  rates($("rates"), $("legend"), lines, SPAN_S, marks);
}

function showMore(state) {
  const lines = state.collectives.map(
    (c) =>
      `rank ${c.rank} of ${c.ranks}: ${c.operations} operations, ` +
      `NICs down: ${c.down.join(", ") || "none"}${c.broken ? `; broken: ${c.broken}` : ""}`,
  );
  lines.push(
    ...state.uplinks.map(
      (u) => `uplink ${u.device}: carrier ${u.carrier}, BFD ${u.bfd}, BGP ${u.bgp}`,
    ),
  );
  $("more").hidden = lines.length === 0;
  $("more-list").replaceChildren(...lines.map((line) => html("li", {}, line)));
}

const FAULTS = [
  ["dies", "dead", "nic"],
  ["port down", "down", "nic"],
  ["cut cable", "cut", "cable"],
];

function showChosen(state) {
  const nic = state.nics.find((n) => n.nic === chosen);
  $("chosen").hidden = !nic;
  if (!nic) return;
  $("chosen-title").textContent = `NIC ${nic.nic}`;
  $("chosen-words").textContent =
    `${nic.addr}, ${nic.state}${nic.is_out ? "" : `, ${rate(rateOf(nic.nic))}`}` +
    (nic.faults.length ? `; faults: ${nic.faults.join(", ")}` : "") +
    (state.may_change ? "" : "; to change something, give the token below");
  const drained = nic.state.endsWith("drained");
  const wanted = [];
  if (state.emulated) {
    for (const [words, what, place] of FAULTS) {
      wanted.push([words, { action: "set-fault", fault: `${place} ${nic.nic} ${what}` }]);
    }
    for (const fault of nic.faults)
      wanted.push([`mend: ${fault}`, { action: "clear-fault", fault }]);
  }
  wanted.push([
    drained ? "use it again" : "drain",
    { action: drained ? "undrain" : "drain", nic: nic.nic },
  ]);
  const said = JSON.stringify([wanted, state.may_change]);
  // Buttons stay as they are while nothing changes: the focus is on one of them.
  if ($("actions").dataset.said === said) return;
  $("actions").dataset.said = said;
  const focused = [...$("actions").children].indexOf(document.activeElement);
  $("actions").replaceChildren(
    ...wanted.map(([words, action]) => {
      const button = html("button", { type: "button" }, words);
      button.disabled = !state.may_change;
      button.addEventListener("click", () => change(action));
      return button;
    }),
  );
  // Other buttons in the same place: who was there stays there.
  if (focused >= 0) focusActions(focused);
}

/** Puts the focus on what can be done to the NIC; on its name where nothing may be done. */
function focusActions(n = 0) {
  const able = [...$("actions").querySelectorAll("button:not(:disabled)")];
  (able[Math.min(n, able.length - 1)] ?? $("chosen-title")).focus({ preventScroll: true });
}

function change(action) {
  const nic = action.nic ?? "";
  const command = {
    "set-fault": `unbroken fault set '${action.fault}'`,
    "clear-fault": `unbroken fault clear '${action.fault}'`,
    drain: `unbroken nic drain ${nic}`,
    undrain: `unbroken nic undrain ${nic}`,
  }[action.action];
  $("confirm-words").textContent = "Change this? It is the same as";
  $("confirm-command").textContent = command;
  const dialog = $("confirm");
  dialog.returnValue = "no";
  dialog.onclose = async () => {
    if (dialog.returnValue !== "yes") return;
    try {
      await ask("/api/act", JSON.stringify(action));
      look();
    } catch (error) {
      $("connection").textContent = `It was not changed: ${error.message}`;
    }
  };
  dialog.showModal();
}

function show(state) {
  last = state;
  remember(state);
  showHead(state);
  // A picture for a narrow screen is another one.
  const room = $("topology").clientWidth;
  const now = `${room < 500 ? room : "wide"} ${state.nics.map((nic) => nic.nic).join(" ")}`;
  if (now !== shape) {
    shape = now;
    draw = topology($("topology"), state.nics, (name) => {
      chosen = name;
      show(last);
      $("chosen").scrollIntoView({ block: "nearest" });
      focusActions();
    });
  }
  draw(state.nics, rateOf, chosen);
  showChosen(state);
  showRates(state);
  showEvents(state);
  showNics(state);
  showQps(state);
  showMore(state);
  $("token-state").textContent = state.may_change ? "changes are allowed" : "";
  $("token-form").hidden = state.may_change;
}

async function look() {
  clearTimeout(timer);
  try {
    show(await ask(`/api/state?from=${from}&count=${PAGE}`));
    $("connection").textContent = "";
  } catch (error) {
    $("connection").textContent = `Not up to date: ${error.message}`;
  }
  clearTimeout(timer);
  // A page that nobody looks at asks for nothing.
  if (!document.hidden) timer = setTimeout(look, EVERY_MS);
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) look();
});
$("qps-back").addEventListener("click", () => {
  from = Math.max(0, from - PAGE);
  look();
});
$("qps-on").addEventListener("click", () => {
  from += PAGE;
  look();
});
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keep($("token").value);
  $("token").value = "";
  look();
});
look();
