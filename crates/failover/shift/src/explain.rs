//! Why a logical QP was given up, in words: whoever reads the event log has nothing else.

use crate::nics::NicTable;
use crate::peer::Peer;
use unbroken_failover_protocol::{FailCause, Liveness, LogicalQp, Reason, SlotPath};
use unbroken_runtime::now_us;
use unbroken_types::WcStatus;

/// Paths that are named; of more it is said how many there are.
const MAX_NAMED: usize = 8;

/// The cause, then what led to it, the error that the application gets, and what is known of every
/// path.
pub(crate) fn give_up(
    nics: &NicTable,
    lqp: &LogicalQp,
    peer: &Peer,
    cause: FailCause,
    status: WcStatus,
) -> String {
    let mut text = cause.describe().to_owned();
    if cause == FailCause::PeerClosed && peer.has_ended() {
        text += ", its process has ended";
    }
    match lqp.attempt() {
        Some(a) => {
            let from = lqp
                .slots()
                .get(a.from_slot)
                .map_or_else(String::new, |path| peer.path_name(nics, path));
            let ms = |since_us: u64| now_us().saturating_sub(since_us) / 1_000;
            text += &format!(
                "; {from} was left {} ms before ({})",
                ms(a.detected_us),
                in_words(a.reason)
            );
            text += &match a.epochs {
                0 => ", no other epoch was entered".to_owned(),
                1 => format!(", epoch {} was tried", lqp.epoch()),
                n => format!(", {n} epochs were tried up to {}", lqp.epoch()),
            };
            text += &match a.peer_heard_us > a.detected_us {
                true => format!(", the peer was last heard {} ms before", ms(a.peer_heard_us)),
                false => ", nothing was heard of the peer since".to_owned(),
            };
        }
        None => text += &format!(", in epoch {} and with nothing wrong here", lqp.epoch()),
    }
    text += &format!(
        "; the error is {}",
        in_words(Reason::QpFailed(status)).trim_start_matches("the QP gave up: ")
    );
    text + &paths(nics, lqp, peer)
}

fn in_words(reason: Reason) -> String {
    match reason {
        Reason::QpFailed(status) => format!("the QP gave up: {status:?}"),
        Reason::PostFailed => "a post failed".into(),
        Reason::DeviceFatal => "the NIC died".into(),
        Reason::PortDown => "the port went down".into(),
        Reason::Stall => "nothing moved any more".into(),
        Reason::Wedged(status) => format!("the QP stood still on a path that lives, {status:?}"),
        Reason::Failback => "its first path works again".into(),
        Reason::Drain => "its NIC is being drained".into(),
        Reason::Loss => "its path loses much more than others".into(),
        Reason::PortPair => "it had no other port pair to migrate to".into(),
        Reason::Peer => "the peer moved".into(),
        Reason::Connect => "it was connected away from its default NIC".into(),
    }
}

/// What is known of the paths, those of which the same is known together.
fn paths(nics: &NicTable, lqp: &LogicalQp, peer: &Peer) -> String {
    let mut all: Vec<SlotPath> = lqp.slots().iter().map(|(_, path)| path).collect();
    all.sort_unstable();
    all.dedup();
    let of = |path: SlotPath| match peer.liveness(nics, path) {
        Liveness::Alive => "believed alive",
        Liveness::NoNic => "without a working NIC here",
        Liveness::Silent if peer.control(path.remote).is_none() => "without a NIC of the peer",
        Liveness::Silent => "found dead by probes",
    };
    let known: Vec<(&str, SlotPath)> = all.into_iter().map(|path| (of(path), path)).collect();
    let mut text = String::new();
    for kind in [
        "believed alive",
        "found dead by probes",
        "without a NIC of the peer",
        "without a working NIC here",
    ] {
        let names: Vec<String> = known
            .iter()
            .filter(|(k, _)| *k == kind)
            .map(|(_, path)| peer.path_name(nics, *path))
            .collect();
        if let Some(named) = names.get(..names.len().min(MAX_NAMED)).filter(|n| !n.is_empty()) {
            let more = names.len() - named.len();
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            text += &format!("; {kind}: {}{more}", named.join(", "));
        }
    }
    text
}
