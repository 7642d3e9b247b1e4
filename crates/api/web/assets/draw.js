// SPDX-License-Identifier: Apache-2.0
// Pictures: elements, the topology, lines of throughput, the timeline. All words that come from the
// server become text nodes, so that no name can be anything else.

const SVG = "http://www.w3.org/2000/svg";

/** An SVG element with attributes and children. */
export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** An HTML element with attributes and children. */
export function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Bits a second with few digits. */
export function rate(bps) {
  const units = ["bit/s", "Kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"];
  let step = 0;
  while (bps >= 1000 && step + 1 < units.length) {
    bps /= 1000;
    step += 1;
  }
  return bps < 1 && step === 0 ? "0" : `${Number(bps.toPrecision(3))} ${units[step]}`;
}

/** A time of the wall clock. */
export function clock(wallUs) {
  return new Date(wallUs / 1000).toLocaleTimeString([], { hour12: false });
}

const [NIC_W, NIC_H, GAP] = [104, 40, 10];
// What is beyond is in the table alone.
const MAX_HOSTS = 12,
  MAX_NICS = 8;

/** The host of a NIC and its rail; a device of the machine has neither. */
function place(name) {
  const [host, rail] = name.split("/");
  return rail === undefined ? ["this machine", null] : [host, Number(rail)];
}

/** Hosts with their NICs below the switches of their rails. Gives what updates it. */
export function topology(into, nics, choose) {
  const hosts = new Map();
  for (const nic of nics) {
    const [host, rail] = place(nic.nic);
    if (!hosts.has(host)) hosts.set(host, []);
    hosts.get(host).push({ name: nic.nic, rail });
  }
  const shown = [...hosts].slice(0, MAX_HOSTS).map(([host, of]) => [host, of.slice(0, MAX_NICS)]);
  const rails = [...new Set(shown.flatMap(([, of]) => of.map((n) => n.rail)))]
    .filter((rail) => rail !== null)
    .sort((a, b) => a - b);
  // Drawn smaller, words could not be read: what does not fit beside goes below.
  const room = into.clientWidth;
  const fit = Math.max(1, Math.floor((room - 3 * GAP) / (NIC_W + GAP)));
  const most = Math.max(1, ...shown.map(([, of]) => of.length));
  const columns = room < 500 ? 1 : Math.max(1, Math.min(4, shown.length));
  const across = Math.min(most, columns > 2 ? 2 : 4, room < 500 ? fit : 4);
  const side = room < 500 ? GAP : 40;
  const hostW = across * (NIC_W + GAP) + GAP,
    hostH = Math.ceil(most / across) * (NIC_H + GAP) + 34;
  const width = Math.max(columns * (hostW + side) + side, rails.length * 84);
  const top = rails.length ? 120 : 10;
  const rows = Math.ceil(shown.length / columns);
  const height = top + rows * (hostH + 40);
  const cables = new Map(),
    boxes = new Map();
  const lines = svg("g"),
    things = svg("g");
  const railX = (n) => (width / (rails.length + 1)) * (n + 1);
  rails.forEach((rail, n) => {
    things.append(
      svg("rect", { class: "switch", x: railX(n) - 38, y: 8, width: 76, height: 28, rx: 5 }),
      svg("text", { x: railX(n), y: 27, "text-anchor": "middle" }, `rail${rail}`),
    );
  });
  shown.forEach(([host, of], h) => {
    const x = side + (h % columns) * (hostW + side),
      y = top + Math.floor(h / columns) * (hostH + 40);
    things.append(
      svg("rect", { class: "host", x, y, width: hostW, height: hostH, rx: 6 }),
      svg(
        "text",
        { x: x + GAP, y: y + hostH - 10, class: "soft" },
        rails.length ? `host ${host}` : host,
      ),
    );
    of.forEach((nic, n) => {
      const bx = x + GAP + (n % across) * (NIC_W + GAP),
        by = y + GAP + Math.floor(n / across) * (NIC_H + GAP);
      if (nic.rail !== null) {
        const from = railX(rails.indexOf(nic.rail)),
          mid = bx + NIC_W / 2;
        const cable = svg("path", {
          class: "cable",
          d: `M${from} 36 C${from} 90 ${mid} ${by - 50} ${mid} ${by}`,
        });
        cables.set(nic.name, cable);
        lines.append(cable);
      }
      const state = svg("text", { x: bx + 8, y: by + 33, class: "soft" });
      const box = svg(
        "g",
        { class: "nic", tabindex: "0", role: "button" },
        svg("rect", { x: bx, y: by, width: NIC_W, height: NIC_H, rx: 5 }),
        svg("text", { x: bx + 8, y: by + 16 }, nic.name),
        state,
      );
      box.dataset.nic = nic.name;
      box.addEventListener("click", () => choose(nic.name));
      box.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          choose(nic.name);
        }
      });
      boxes.set(nic.name, [box, state]);
      things.append(box);
    });
  });
  into.replaceChildren(
    svg(
      "svg",
      {
        viewBox: `0 0 ${width} ${height}`,
        role: "group",
        "aria-label": `${hosts.size} hosts, ${nics.length} NICs`,
      },
      lines,
      things,
    ),
  );
  into.firstChild.style.maxWidth = `${width * 1.2}px`;
  return (now, rates, chosen) => {
    const peak = Math.max(1, ...now.map((nic) => rates(nic.nic)));
    for (const nic of now) {
      const [box, state] = boxes.get(nic.nic) ?? [];
      if (!box) continue;
      const drained = nic.state === "active, drained";
      const kind = nic.is_out && !drained ? "is-out" : nic.is_impaired ? "is-impaired" : "";
      // What it carried until it went out is no rate of now.
      const bps = kind === "is-out" ? 0 : rates(nic.nic);
      box.setAttribute("class", `nic ${kind}`);
      box.setAttribute("aria-pressed", String(nic.nic === chosen));
      const why = nic.faults.length ? `, ${nic.faults.join(", ")}` : "";
      box.setAttribute("aria-label", `NIC ${nic.nic}: ${nic.state}${why}, ${rate(bps)}`);
      // A cut cable leaves the state as it is: the NIC does not know.
      const word = drained
        ? "drained"
        : nic.state === "active" && nic.is_out
          ? "cut off"
          : nic.state;
      state.textContent = word === "active" ? rate(bps) : word;
      const cable = cables.get(nic.nic);
      cable?.setAttribute("class", `cable ${kind}`);
      if (cable) cable.style.strokeWidth = `${1.5 + 6 * Math.sqrt(bps / peak) * (bps > 0)}px`;
    }
  };
}

/** The width of a chart: on a narrow screen words keep their size. */
const chartWidth = (into) => Math.min(640, Math.max(280, into.clientWidth || 640));

/** Lines that would hide one another, as those of both ends of a cable, are one line with all their
 * names: [names, points]. */
export function merged(lines, peak) {
  const groups = [];
  const near = (a, b) =>
    a.length === b.length && a.every(([, bps], n) => Math.abs(bps - b[n][1]) <= 0.02 * peak);
  for (const [name, points] of lines) {
    const same = groups.find(([, of]) => near(of, points));
    if (same) same[0] += `, ${name}`;
    else groups.push([name, points]);
  }
  return groups;
}

/** Lines of throughput: `lines` has [name, points of (seconds ago, bit/s)], `marks` [seconds ago,
 * words] of what happened. */
export function rates(into, legend, all, span, marks) {
  const peak = Math.max(1, ...all.flatMap(([, points]) => points.map(([, bps]) => bps)));
  const lines = merged(all, peak);
  if (lines.length === 0 && marks.length === 0) {
    into.replaceChildren(html("p", { class: "hint" }, "No NIC has carried anything of late."));
    legend.replaceChildren();
    return;
  }
  const [width, height, left, bottom] = [chartWidth(into), 230, 74, 24];
  const step = 10 ** Math.floor(Math.log10(peak));
  const top = Math.ceil(peak / step) * step;
  const x = (ago) => width - 10 - ((width - left - 10) * ago) / span;
  const y = (bps) => height - bottom - ((height - bottom - 10) * bps) / top;
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    parts.push(
      svg("line", {
        class: "grid",
        x1: left,
        x2: width - 10,
        y1: y(top * share),
        y2: y(top * share),
      }),
      svg(
        "text",
        { class: "soft", x: left - 6, y: y(top * share) + 4, "text-anchor": "end" },
        rate(top * share),
      ),
    );
  }
  for (const ago of [0, span / 2, span]) {
    const anchor = ago === 0 ? "end" : ago === span ? "start" : "middle";
    const words = ago === 0 ? "now" : `${ago} s ago`;
    parts.push(
      svg("text", { class: "soft", x: x(ago), y: height - 5, "text-anchor": anchor }, words),
    );
  }
  for (const [ago, words] of marks) {
    const at = { class: "event", x1: x(ago), x2: x(ago), y1: 10, y2: height - bottom };
    parts.push(svg("line", at, svg("title", {}, words)));
  }
  lines.forEach(([, points], n) => {
    const way = points.map(([ago, bps]) => `${x(ago).toFixed(1)},${y(bps).toFixed(1)}`).join(" ");
    parts.push(svg("polyline", { class: `line line-${n % 8}`, points: way }));
  });
  const said = lines.map(([name, points]) => `${name} ${rate(points.at(-1)?.[1] ?? 0)}`).join(", ");
  into.replaceChildren(
    svg(
      "svg",
      {
        viewBox: `0 0 ${width} ${height}`,
        role: "img",
        "aria-label": `Throughput now: ${said || "none"}`,
      },
      ...parts,
    ),
  );
  legend.replaceChildren(
    ...lines.map(([name], n) =>
      html(
        "li",
        {},
        svg(
          "svg",
          { viewBox: "0 0 34 10", "aria-hidden": "true" },
          svg("line", { class: `line line-${n % 8}`, x1: 0, x2: 34, y1: 5, y2: 5 }),
        ),
        ` ${name}`,
      ),
    ),
  );
}

// Half of the width of a mark.
const MARK = 6;
const LANES = ["faults", "NICs", "switches", "failures"];

/** What happened over time, each kind in a lane. */
export function timeline(into, events, nowUs) {
  const [width, lane, left] = [chartWidth(into), 26, 74];
  const height = LANES.length * lane + 24;
  // From the first event that is told, and a little before: a mark must not lie on a lane's name.
  const oldest = events[0]?.wall_us ?? nowUs;
  const span = Math.max(60e6, 1.02 * (nowUs - oldest));
  const [from, to] = [left + MARK + 2, width - 10 - MARK];
  const x = (us) => from + ((to - from) * Math.max(0, us - (nowUs - span))) / span;
  const parts = LANES.flatMap((name, n) => [
    svg("line", {
      class: "grid",
      x1: left,
      x2: width - 10,
      y1: (n + 0.5) * lane,
      y2: (n + 0.5) * lane,
    }),
    svg(
      "text",
      { class: "soft", x: left - 6, y: (n + 0.5) * lane + 4, "text-anchor": "end" },
      name,
    ),
  ]);
  const open = new Map();
  const bar = (begin, end, words) =>
    parts.push(
      svg(
        "rect",
        { class: "bar", x: x(begin), y: 5, width: Math.max(3, x(end) - x(begin)), height: lane - 10 },
        svg("title", {}, words),
      ),
    );
  const dot = (event, n, kind, shape) => {
    if (event.wall_us < nowUs - span) return;
    const [cx, cy] = [x(event.wall_us), (n + 0.5) * lane];
    const d =
      shape === "down"
        ? `M${cx - 6} ${cy - 5}h12l-6 11z`
        : shape === "up"
          ? `M${cx - 6} ${cy + 5}h12l-6 -11z`
          : `M${cx - 5} ${cy}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z`;
    parts.push(svg("path", { class: `mark-${kind}`, d }, svg("title", {}, event.words)));
  };
  for (const event of events) {
    switch (event.event) {
      case "fault":
        open.set(event.fault, event);
        break;
      case "fault-clear":
        if (open.has(event.fault)) bar(open.get(event.fault).wall_us, event.wall_us, event.fault);
        open.delete(event.fault);
        break;
      case "port-down":
      case "device-fatal":
        dot(event, 1, "bad", "down");
        break;
      case "port-active":
        dot(event, 1, "good", "up");
        break;
      case "switch":
        dot(event, 2, event.kind === "passive" ? "warn" : "good", "dot");
        break;
      case "give-up":
        dot(event, 3, "bad", "down");
        break;
    }
  }
  for (const [fault, event] of open) if (event.wall_us <= nowUs) bar(event.wall_us, nowUs, fault);
  for (const share of [0, 0.5, 1]) {
    const us = nowUs - span * (1 - share);
    parts.push(
      svg(
        "text",
        {
          class: "soft",
          x: x(us),
          y: height - 5,
          "text-anchor": ["start", "middle", "end"][share * 2],
        },
        clock(us),
      ),
    );
  }
  into.replaceChildren(
    svg(
      "svg",
      {
        viewBox: `0 0 ${width} ${height}`,
        role: "img",
        "aria-label": `${events.length} events of late; the list below has them in words`,
      },
      ...parts,
    ),
  );
}
