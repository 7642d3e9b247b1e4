//! `unbroken status`.

use unbroken_events::{BackupsStatus, NicStatus, QpStatus, NIC_COUNTERS};
use unbroken_fabric::{now_us, Runtime};
use unbroken_observe::Status;
use unbroken_units::text::shown;

use crate::output::{print, print_json, table, Result};
use crate::place::Place;

pub(crate) fn status(place: &Place, json: bool) -> Result {
    let nothing = || Status {
        time_us: now_us(),
        runtime: place.path().display().to_string(),
        ..Status::default()
    };
    let status = place.look()?.map_or_else(|| Ok(nothing()), |runtime| collect(&runtime))?;
    if json {
        return print_json(&status);
    }
    let mut text = nic_table(&status.nics);
    if text.is_empty() {
        text = "no NIC has been opened yet\n".into();
    }
    text += &pinned_line(&status.nics);
    for process in &status.processes {
        if process.error.is_empty() {
            let (program, host) = (shown(&process.program), shown(&process.host));
            text += &format!("\n{program} (pid {}) on host {host}\n", process.pid);
        } else {
            text += &format!("\npid {}: {}\n", process.pid, shown(&process.error));
        }
        if process.forged > 0 {
            text += &format!(
                "{} forged control datagrams were dropped: somebody else sends to its NICs\n",
                process.forged
            );
        }
        text += &backups_line(&process.backups);
        text += &qp_table(status.qps.iter().filter(|q| q.process == process.id).map(|q| &q.qp));
    }
    print(&text)
}

/// The memory that is registered on each NIC, where each has its own: it is pinned once for each.
fn pinned_line(nics: &[NicStatus]) -> String {
    let has = nics.iter().filter(|nic| nic.registered_bytes > 0);
    let each: Vec<String> =
        has.map(|nic| format!("{} {:.1} MB", nic.nic, nic.registered_bytes as f64 / 1e6)).collect();
    match each.is_empty() {
        true => String::new(),
        false => format!("memory pinned: {}\n", each.join(", ")),
    }
}

/// What is made ready, where something is.
fn backups_line(backups: &BackupsStatus) -> String {
    let BackupsStatus { ready, awaited, made, mean_us, failures, unanswered, undestroyed } =
        backups;
    let left = match (unanswered, undestroyed) {
        (0, 0) => String::new(),
        _ => format!(
            "queue pairs that were left: {unanswered} commands without an answer, {undestroyed} \
             that their device refuses to destroy\n"
        ),
    };
    if made + failures == 0 {
        return left;
    }
    let refused = match failures {
        0 => String::new(),
        failures => format!(", {failures} refused by their device"),
    };
    format!(
        "backup queue pairs: {ready} ready, {awaited} awaited; {made} made, {mean_us} µs \
         each{refused}\n{left}"
    )
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

/// The status, with what could not be read told.
fn collect(runtime: &Runtime) -> Result<Status> {
    let status = unbroken_observe::status(runtime)?;
    status.problems.iter().for_each(|problem| eprintln!("unbroken: {}", shown(problem)));
    Ok(status)
}

/// The NICs that there are, whether or not somebody uses them.
pub(crate) fn all_nics(runtime: &Runtime) -> Result<Vec<NicStatus>> {
    Ok(collect(runtime)?.nics)
}

/// The state of a NIC, and which legs of its bond are down.
fn with_legs(nic: &NicStatus) -> String {
    match nic.legs_down.is_empty() {
        true => nic.state.clone(),
        false => format!("{}, leg {} down", nic.state, nic.legs_down.join(", ")),
    }
}

/// The NICs that someone opened or that have a fault.
fn nic_table(nics: &[NicStatus]) -> String {
    let shown = |n: &&NicStatus| {
        n.state.ends_with("drained")
            || n.counters.tx_packets + n.counters.rx_packets > 0
            || !n.pids.is_empty()
            || !n.faults.is_empty()
    };
    let columns = || NIC_COUNTERS.iter().filter_map(|c| Some((c.of, c.column?)));
    let mut head = ["nic", "address", "device", "state"].map(String::from).to_vec();
    head.extend(columns().map(|(_, column)| column.heading().into()));
    head.push("faults".into());
    let mut rows = vec![head];
    rows.extend(nics.iter().filter(shown).map(|n| {
        let mut row = vec![n.nic.clone(), n.addr.clone(), n.device.clone(), with_legs(n)];
        row.extend(columns().map(|(of, column)| column.show(n.counters.get(of))));
        row.push(n.faults.join(", "));
        row
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
        let protected = match (q.protected, q.pending) {
            (true, _) => "yes".into(),
            (false, true) => format!("pending: {}", q.why),
            (false, false) => format!("no: {}", q.why),
        };
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

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_events::NicCounters;

    #[test]
    fn a_leg_that_is_down_is_shown_with_the_state() {
        let nic = NicStatus {
            nic: "mlx5_bond_0".into(),
            addr: "10.0.0.1".into(),
            device: "verbs".into(),
            state: "active".into(),
            faults: Vec::new(),
            legs_down: vec!["ens1f1".into()],
            pids: vec![7],
            registered_bytes: 0,
            counters: NicCounters::default(),
        };
        let table = nic_table(&[nic]);
        assert!(table.contains("active, leg ens1f1 down"), "{table}");
    }
}
