//! The status of a runtime folder: its NICs with counters and faults, and what its processes say.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use serde::Serialize;
use unbroken_events::{
    answering_processes, query_status, BackupsStatus, NicStatus, ProcessStatus, QpStatus, SdrStatus,
};
use unbroken_fabric::{
    device_kind_name, now_us, Fabric, NicName, NicPage, Presence, ProcessName, Runtime,
};
use unbroken_nics::DeviceFaults;
use unbroken_runtime::Drains;

use crate::error::{ObserveError, Result};

/// Entries of the folder of NICs' pages that are none and are named.
const MAX_STRAYS: usize = 16;
/// A process that does not answer within this is shown as such.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// What `unbroken status --json` shows.
#[derive(Serialize, Clone, Debug, Default)]
pub struct Status {
    /// When it was taken, by [`now_us`].
    pub time_us: u64,
    /// The runtime folder.
    pub runtime: String,
    /// All NICs of the fabric, and others that were opened.
    pub nics: Vec<NicStatus>,
    /// The logical QPs of all processes that answer.
    pub qps: Vec<ProcessQp>,
    /// The processes.
    pub processes: Vec<Process>,
    /// What could not be read, in words.
    #[serde(skip)]
    pub problems: Vec<String>,
}

/// A logical QP with its process.
#[derive(Serialize, Clone, Debug, Default)]
pub struct ProcessQp {
    /// Two in different PID namespaces may have the same pid.
    #[serde(skip)]
    pub process: u64,
    /// The process.
    pub pid: u32,
    /// The QP.
    #[serde(flatten)]
    pub qp: QpStatus,
}

/// A process that uses the runtime folder.
#[derive(Serialize, Clone, Debug, Default)]
pub struct Process {
    /// Which one; pids are not unique where there are PID namespaces.
    #[serde(skip)]
    pub id: u64,
    /// Its pid as it sees it itself.
    pub pid: u32,
    /// The name of its program.
    pub program: String,
    /// Its host, `a`.
    pub host: String,
    /// Control datagrams without the runtime folder's seal, which it dropped.
    pub forged: u64,
    /// Its QPs that are made ahead on other NICs.
    pub backups: BackupsStatus,
    /// What its SDR queue pairs have counted, where it has had any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sdr: Option<SdrStatus>,
    /// Why it did not answer; empty where it did.
    pub error: String,
}

/// What the processes of a runtime folder answered.
#[derive(Clone, Debug, Default)]
pub struct Answers {
    /// Their logical QPs.
    pub qps: Vec<ProcessQp>,
    /// The processes, also those that did not answer.
    pub processes: Vec<Process>,
    /// Devices of the machine that they have open.
    pub nics: Vec<NicStatus>,
}

/// The status of a runtime folder, now.
pub fn status(runtime: &Runtime) -> Result<Status> {
    let fabric = fabric(runtime)?;
    let answers = ask_processes(runtime, Duration::MAX)?;
    let mut status = Status { qps: answers.qps, processes: answers.processes, ..empty(runtime) };
    let seen = nics(runtime, fabric.as_ref(), &answers.nics)?;
    status.nics = seen.nics;
    status.problems = [seen.problems, seen.left_out].concat();
    Ok(status)
}

/// The status of a folder that nobody uses.
fn empty(runtime: &Runtime) -> Status {
    Status { time_us: now_us(), runtime: runtime.path().display().to_string(), ..Status::default() }
}

/// The fabric of a runtime folder, if it has one.
pub fn fabric(runtime: &Runtime) -> Result<Option<Fabric>> {
    Ok(if runtime.fabric_toml().exists() { Some(Fabric::open(runtime)?) } else { None })
}

/// The NICs of a runtime folder.
#[derive(Clone, Debug, Default)]
pub struct Nics {
    /// All of them.
    pub nics: Vec<NicStatus>,
    /// What of them could not be read, in words.
    pub problems: Vec<String>,
    /// What lies in their folder and is no NIC of anybody, in words.
    pub left_out: Vec<String>,
}

/// All NICs with states, counters, faults and drains: those of the fabric, those that were opened,
/// and devices of the machine as processes tell of them.
pub fn nics(
    runtime: &Runtime,
    fabric: Option<&Fabric>,
    of_processes: &[NicStatus],
) -> Result<Nics> {
    let Nics { mut nics, mut problems, left_out } = nic_statuses(runtime, fabric)?;
    add_nics(&mut nics, of_processes);
    // A table that cannot be trusted hides nothing else.
    let of_devices = DeviceFaults::of(runtime).holding().unwrap_or_else(|e| {
        problems.push(e.to_string());
        Vec::new()
    });
    for fault in of_devices {
        let of_it = nics.iter_mut().filter(|nic| nic.nic == fault.device);
        of_it.for_each(|nic| nic.faults.push(fault.to_string()));
    }
    mark_drained(runtime, &mut nics)?;
    Ok(Nics { nics, problems, left_out })
}

/// Asks all processes for their logical QPs, each for a second at most, and all together no longer
/// than `patience`. What only one end of a connection knows is said at the other, too.
pub fn ask_processes(runtime: &Runtime, patience: Duration) -> Result<Answers> {
    let (presence, began) = (presence(runtime)?, Instant::now());
    let mut answers = Answers::default();
    let names = answering_processes(runtime)
        .map_err(|e| ObserveError::io(runtime.sockets().display(), e))?;
    for name in names {
        let left = patience.saturating_sub(began.elapsed());
        let timeout = ANSWER_TIMEOUT.min(left);
        let answer = match timeout.is_zero() {
            true => Err(std::io::Error::other("others did not, and it was not asked")),
            false => query_status(runtime, name, timeout),
        };
        match answer {
            Ok(answer) => take(&mut answers, name, answer),
            // It ended while we asked.
            Err(_) if !presence.lives(name.id) => {}
            Err(e) => answers.processes.push(Process {
                id: name.id,
                pid: name.pid,
                error: format!("does not answer: {e}"),
                ..Process::default()
            }),
        }
    }
    join_ends(&mut answers.qps);
    Ok(answers)
}

fn take(answers: &mut Answers, name: ProcessName, answer: ProcessStatus) {
    let ProcessStatus { program, host, forged, qps, nics, backups, sdr, .. } = answer;
    let (id, pid) = (name.id, name.pid);
    add_nics(&mut answers.nics, &nics);
    answers.qps.extend(qps.into_iter().map(|qp| ProcessQp { process: id, pid, qp }));
    let error = String::new();
    answers.processes.push(Process { id, pid, program, host, forged, backups, sdr, error });
}

/// This process as one that takes part in the runtime folder, by which it can ask who else does.
pub fn presence(runtime: &Runtime) -> Result<Presence> {
    Presence::join(runtime).map_err(|e| ObserveError::io(runtime.path().display(), e))
}

/// A QP is protected if both of its ends are: what only one of them knows is said at the other,
/// too.
fn join_ends(qps: &mut [ProcessQp]) {
    let ends: HashMap<(&str, &str), &QpStatus> =
        qps.iter().map(|q| ((q.qp.own.as_str(), q.qp.peer.as_str()), &q.qp)).collect();
    let told = |q: &ProcessQp| {
        let peer = ends.get(&(q.qp.peer.as_str(), q.qp.own.as_str()))?;
        (q.qp.protected && !peer.protected)
            .then(|| (peer.pending, format!("its peer: {}", peer.why)))
    };
    let news: Vec<Option<(bool, String)>> = qps.iter().map(told).collect();
    for (q, why) in qps.iter_mut().zip(news) {
        if let Some((pending, why)) = why {
            (q.qp.protected, q.qp.pending, q.qp.why) = (false, pending, why);
        }
    }
}

/// All NICs of the fabric, then others that were opened.
pub fn nic_statuses(runtime: &Runtime, fabric: Option<&Fabric>) -> Result<Nics> {
    let (mut statuses, mut problems) = (Vec::new(), Vec::new());
    let presence = presence(runtime)?;
    let opened = NicPage::addresses(runtime)?;
    let folder = runtime.nic_pages();
    let stray = |name: String| format!("{} is no NIC's page", folder.join(name).display());
    let mut strays: Vec<String> = NicPage::strays(runtime)?.into_iter().map(stray).collect();
    for nic in fabric.iter().flat_map(|fabric| fabric.nics().map(move |nic| (fabric, nic))) {
        let (fabric, nic) = nic;
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
            let words = [name.to_string(), device_kind_name(kind.device).into(), text.into()];
            let (mut status, problem) =
                nic_status(runtime, &presence, words, addr, opened.contains(&addr));
            problems.extend(problem);
            status.faults = faults.iter().map(ToString::to_string).collect();
            statuses.push(status);
        }
    }
    let known: Vec<String> = statuses.iter().map(|s| s.addr.clone()).collect();
    for addr in opened.iter().filter(|a| !known.contains(&a.to_string())) {
        let words = [addr.to_string(), "unknown".into(), "unknown".into()];
        match nic_status(runtime, &presence, words, *addr, true) {
            (status, None) => statuses.push(status),
            // Nothing else says that it was ever a NIC's.
            (_, Some(problem)) => strays.push(problem),
        }
    }
    Ok(Nics { nics: statuses, problems, left_out: named(strays) })
}

/// The first of many, and how many more there are: anything may lie in a folder.
fn named(mut strays: Vec<String>) -> Vec<String> {
    let more = strays.len().saturating_sub(MAX_STRAYS);
    strays.truncate(MAX_STRAYS);
    strays.extend((more > 0).then(|| format!("{more} more that are no NICs' pages")));
    strays
}

/// Adds what a process tells of the machine's devices. Each process that has one open tells the
/// same of it, but for what it has sent since it opened it: the most is shown. One that has not
/// noticed yet, or was started when all was well again, does not hide what others have met.
fn add_nics(nics: &mut Vec<NicStatus>, of_process: &[NicStatus]) {
    for fresh in of_process {
        match nics.iter_mut().find(|known| known.nic == fresh.nic) {
            None => nics.push(fresh.clone()),
            Some(known) => {
                known.pids.extend(&fresh.pids);
                known.registered_bytes += fresh.registered_bytes;
                if worse(&fresh.state) > worse(&known.state) {
                    known.state.clone_from(&fresh.state);
                }
                let (all, of_one) = (&mut known.counters, fresh.counters);
                all.tx_bytes = all.tx_bytes.max(of_one.tx_bytes);
                all.rx_bytes = all.rx_bytes.max(of_one.rx_bytes);
            }
        }
    }
}

/// How bad a state is.
fn worse(state: &str) -> u8 {
    match state {
        "dead" => 3,
        "down" => 2,
        "active" => 1,
        _ => 0,
    }
}

/// Says of NICs that they are drained.
pub fn mark_drained(runtime: &Runtime, nics: &mut [NicStatus]) -> Result<()> {
    let drained =
        Drains::of(runtime).all().map_err(|e| ObserveError::io(runtime.path().display(), e))?;
    for nic in nics.iter_mut().filter(|n| drained.contains(&whole_nic(&n.nic))) {
        nic.state += ", drained";
    }
    Ok(())
}

/// The NIC that a name means: a port's name means its NIC, since a drain is of all of it. An
/// address is a name by itself.
pub fn whole_nic(name: &str) -> String {
    name.parse::<NicName>().map_or_else(|_| name.into(), |nic| nic.at_port(0).to_string())
}

/// A NIC, and why its page cannot be read, if it cannot: then nobody is known to use it.
fn nic_status(
    runtime: &Runtime,
    presence: &Presence,
    [nic, device, state]: [String; 3],
    addr: IpAddr,
    opened: bool,
) -> (NicStatus, Option<String>) {
    let (mut pids, mut counters, mut problem) = (Vec::new(), Default::default(), None);
    match opened.then(|| NicPage::open(runtime, addr)) {
        Some(Ok(page)) => {
            pids = page.users(presence).into_iter().map(|user| user.pid).collect();
            counters = page.counters();
        }
        Some(Err(e)) => problem = Some(e.to_string()),
        None => {}
    }
    let (addr, faults) = (addr.to_string(), Vec::new());
    let status = NicStatus {
        nic,
        addr,
        device,
        state,
        faults,
        legs_down: Vec::new(),
        pids,
        registered_bytes: 0,
        counters,
    };
    (status, problem)
}
