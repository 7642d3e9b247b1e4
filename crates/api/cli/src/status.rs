//! `unbroken status`.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use serde::Serialize;
use unbroken_events::{answering_processes, query_status, NicStatus, ProcessStatus, QpStatus};
use unbroken_fabric::{device_kind_name, now_us, Fabric, NicPage, Presence, ProcessName, Runtime};
use unbroken_runtime::Drains;

use crate::output::{print, print_json, table, Failure, Result};

/// A process that does not answer within this is shown as such.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Serialize)]
struct Status {
    time_us: u64,
    runtime: String,
    nics: Vec<NicStatus>,
    qps: Vec<ProcessQp>,
    processes: Vec<Process>,
}

/// A logical QP with its process.
#[derive(Serialize)]
struct ProcessQp {
    /// Two in different PID namespaces may have the same pid.
    #[serde(skip)]
    process: ProcessName,
    pid: u32,
    #[serde(flatten)]
    qp: QpStatus,
}

#[derive(Serialize)]
struct Process {
    #[serde(skip)]
    name: ProcessName,
    pid: u32,
    program: String,
    host: String,
    /// Control datagrams without the runtime folder's seal, which it dropped.
    forged: u64,
    /// Why it did not answer; empty where it did.
    error: String,
}

pub(crate) fn status(runtime: &Runtime, json: bool) -> Result {
    let status = collect(runtime)?;
    if json {
        return print_json(&status);
    }
    let mut text = nic_table(&status.nics);
    if text.is_empty() {
        text = "no NIC has been opened yet\n".into();
    }
    for process in &status.processes {
        if process.error.is_empty() {
            text +=
                &format!("\n{} (pid {}) on host {}\n", process.program, process.pid, process.host);
        } else {
            text += &format!("\npid {}: {}\n", process.pid, process.error);
        }
        if process.forged > 0 {
            text += &format!(
                "{} forged control datagrams were dropped: somebody else sends to its NICs\n",
                process.forged
            );
        }
        text += &qp_table(status.qps.iter().filter(|q| q.process == process.name).map(|q| &q.qp));
    }
    print(&text)
}

/// What the processes say, with their pids.
pub(crate) struct Answers {
    /// The logical QPs of all that answer.
    pub(crate) qps: Vec<(u32, QpStatus)>,
    /// The others, and why.
    pub(crate) silent: Vec<(u32, String)>,
}

/// Asks all processes for their logical QPs.
pub(crate) fn ask_all(runtime: &Runtime) -> Result<Answers> {
    let status = collect(runtime)?;
    let silent = status.processes.into_iter().filter(|p| !p.error.is_empty());
    Ok(Answers {
        qps: status.qps.into_iter().map(|q| (q.pid, q.qp)).collect(),
        silent: silent.map(|p| (p.pid, p.error)).collect(),
    })
}

fn collect(runtime: &Runtime) -> Result<Status> {
    // To look must not make a fabric.
    let fabric = if runtime.fabric_toml().exists() { Some(Fabric::open(runtime)?) } else { None };
    let nics = nic_statuses(runtime, fabric.as_ref())?;
    let presence = presence(runtime)?;
    let (mut qps, mut processes) = (Vec::new(), Vec::new());
    for name in
        answering_processes(runtime).map_err(|e| Failure::io(runtime.sockets().display(), e))?
    {
        let pid = name.pid;
        match query_status(runtime, name, ANSWER_TIMEOUT) {
            Ok(ProcessStatus { program, host, forged, qps: of_process, .. }) => {
                qps.extend(of_process.into_iter().map(|qp| ProcessQp { process: name, pid, qp }));
                processes.push(Process { name, pid, program, host, forged, error: String::new() });
            }
            // It ended while we asked.
            Err(_) if !presence.lives(name.id) => {}
            Err(e) => {
                let error = format!("does not answer: {e}");
                processes.push(Process {
                    name,
                    pid,
                    program: String::new(),
                    host: String::new(),
                    forged: 0,
                    error,
                });
            }
        }
    }
    join_ends(&mut qps);
    Ok(Status {
        time_us: now_us(),
        runtime: runtime.path().display().to_string(),
        nics,
        qps,
        processes,
    })
}

/// This process as one that takes part in the runtime folder, by which it can ask who else does.
pub(crate) fn presence(runtime: &Runtime) -> Result<Presence> {
    Presence::join(runtime).map_err(|e| Failure::io(runtime.path().display(), e))
}

/// A QP is protected if both of its ends are: what only one of them knows is said at the other,
/// too.
fn join_ends(qps: &mut [ProcessQp]) {
    let ends: HashMap<(&str, &str), &QpStatus> =
        qps.iter().map(|q| ((q.qp.own.as_str(), q.qp.peer.as_str()), &q.qp)).collect();
    let told = |q: &ProcessQp| {
        let peer = ends.get(&(q.qp.peer.as_str(), q.qp.own.as_str()))?;
        (q.qp.protected && !peer.protected).then(|| format!("its peer: {}", peer.why))
    };
    let news: Vec<Option<String>> = qps.iter().map(told).collect();
    for (q, why) in qps.iter_mut().zip(news) {
        if let Some(why) = why {
            (q.qp.protected, q.qp.why) = (false, why);
        }
    }
}

/// All NICs of the fabric, then others that were opened.
pub(crate) fn nic_statuses(runtime: &Runtime, fabric: Option<&Fabric>) -> Result<Vec<NicStatus>> {
    let mut statuses = Vec::new();
    let presence = presence(runtime)?;
    let opened = NicPage::addresses(runtime)?;
    if let Some(fabric) = fabric {
        for nic in fabric.nics() {
            let kind = fabric.nic_kind(&nic.host, nic.index);
            for port in 1..=kind.ports {
                let addr = IpAddr::from(fabric.port_addr(&nic.host, nic.index, port)?);
                let (state, faults) = fabric.nic_state(&nic.at_port(port))?;
                let text = match (state.alive, state.port_up(port)) {
                    (false, _) => "dead",
                    (true, false) => "down",
                    (true, true) => "active",
                };
                // Port 1 has the name of its NIC.
                let name = if port == 1 { nic.clone() } else { nic.at_port(port) };
                let faults = faults.iter().map(ToString::to_string).collect();
                statuses.push(nic_status(
                    runtime,
                    &presence,
                    name.to_string(),
                    addr,
                    opened.contains(&addr),
                    [device_kind_name(kind.device), text],
                    faults,
                )?);
            }
        }
    }
    let known: Vec<String> = statuses.iter().map(|s| s.addr.clone()).collect();
    for addr in opened.iter().filter(|a| !known.contains(&a.to_string())) {
        statuses.push(nic_status(
            runtime,
            &presence,
            addr.to_string(),
            *addr,
            true,
            ["unknown"; 2],
            Vec::new(),
        )?);
    }
    let drained =
        Drains::of(runtime).all().map_err(|e| Failure::io(runtime.path().display(), e))?;
    for nic in statuses.iter_mut().filter(|n| drained.contains(&n.nic)) {
        nic.state += ", drained";
    }
    Ok(statuses)
}

fn nic_status(
    runtime: &Runtime,
    presence: &Presence,
    nic: String,
    addr: IpAddr,
    opened: bool,
    [device, state]: [&str; 2],
    faults: Vec<String>,
) -> Result<NicStatus> {
    let (mut pids, mut counters) = (Vec::new(), Default::default());
    if opened {
        let page = NicPage::open(runtime, addr)?;
        pids = page.users(presence).into_iter().map(|user| user.pid).collect();
        counters = page.counters();
    }
    let (addr, device, state) = (addr.to_string(), device.to_owned(), state.to_owned());
    Ok(NicStatus { nic, addr, device, state, faults, pids, counters })
}

/// The NICs that someone opened or that have a fault.
fn nic_table(nics: &[NicStatus]) -> String {
    let shown = |n: &&NicStatus| {
        n.state.ends_with("drained")
            || n.counters.tx_packets + n.counters.rx_packets > 0
            || !n.pids.is_empty()
            || !n.faults.is_empty()
    };
    let mut rows = vec![[
        "nic",
        "address",
        "device",
        "state",
        "tx MB",
        "rx MB",
        "sent again",
        "dropped",
        "bad ICRC",
        "strangers",
        "faults",
    ]
    .map(String::from)
    .to_vec()];
    rows.extend(nics.iter().filter(shown).map(|n| {
        let mb = |bytes: u64| format!("{:.1}", bytes as f64 / 1e6);
        let c = &n.counters;
        vec![
            n.nic.clone(),
            n.addr.clone(),
            n.device.clone(),
            n.state.clone(),
            mb(c.tx_bytes),
            mb(c.rx_bytes),
            c.retransmits.to_string(),
            c.drops.to_string(),
            c.icrc_errors.to_string(),
            c.strangers.to_string(),
            n.faults.join(", "),
        ]
    }));
    if rows.len() > 1 {
        table(&rows)
    } else {
        String::new()
    }
}

fn qp_table<'a>(qps: impl Iterator<Item = &'a QpStatus>) -> String {
    let mut rows =
        vec![["  qp", "state", "path", "peer", "epoch", "protected"].map(String::from).to_vec()];
    rows.extend(qps.map(|q| {
        let protected = if q.protected { "yes".into() } else { format!("no: {}", q.why) };
        let path = match (&*q.path, &*q.alternate) {
            ("", "") => q.primary.clone(),
            ("", alternate) => format!("{}, alternate {alternate}, {}", q.primary, q.migration),
            (path, _) => path.to_owned(),
        };
        vec![
            format!("  {:#x}", q.qp),
            q.state.clone(),
            path,
            q.peer.clone(),
            q.epoch.to_string(),
            protected,
        ]
    }));
    if rows.len() > 1 {
        table(&rows)
    } else {
        "  no QPs\n".into()
    }
}
