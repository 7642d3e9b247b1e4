//! Control messages that arrive.
//!
//! The worker receives them when the channel wakes it, and so does every application thread that
//! polls a CQ in vain: on a machine whose cores are all busy polling, a thread that must be woken
//! may wait for milliseconds, while the thread that polls is there. So a switch between two
//! programs that poll needs no other thread. Messages may be handled in any order and by any
//! thread; what they change lies behind the gates of the QPs.

use crate::control_endpoint::{ControlAddr, LocalPort};
use crate::core::Core;
use crate::link;
use crate::lock::lock;
use crate::qp::Qp;
use crate::worker_queue::Job;
use std::sync::{Arc, MutexGuard};
use unbroken_failover_protocol::message::{Body, Keys, RefuseReason};
use unbroken_failover_protocol::Message;
use unbroken_verbs::{IdleHook, KeyAnswer, KeyRow};

/// What polls that find nothing do besides: an idle poller drives the NICs that it does not poll
/// anyway, and takes messages.
pub(crate) fn idle_hook(core: &Arc<Core<Qp>>) -> IdleHook {
    let own = core.clone();
    IdleHook::new(core.nics.channel(), move || look(&own))
}

#[cold]
fn look(core: &Arc<Core<Qp>>) {
    if core.process.elsewhere() {
        return;
    }
    core.nics.drive_endpoints();
    if core.nics.channel().has_events() {
        try_receive(core);
    }
}

/// Handles every message that has arrived, unless another thread is at it just now.
pub(crate) fn try_receive(core: &Arc<Core<Qp>>) {
    if let Ok(turn) = core.control.receiving.try_lock() {
        receive_in_turn(core, turn);
    }
}

/// Handles every message that has arrived. One thread at a time: who waits for its turn knows
/// afterwards that no message is in the hands of a thread that has lost its core.
pub(crate) fn receive(core: &Arc<Core<Qp>>) {
    receive_in_turn(core, lock(&core.control.receiving));
}

fn receive_in_turn(core: &Arc<Core<Qp>>, _turn: MutexGuard<'_, ()>) {
    let mut messages = Vec::new();
    // First the events, then the messages: one that arrives in between raises the next event.
    core.nics.channel().drain();
    fetch(core, &mut messages);
    if messages.iter().any(|(.., m)| matches!(m.body, Body::Probe(_))) {
        // Who asks whether one path lives compares it with others. A thread that has lost its core
        // in the middle of its work on a NIC must not make that one look worse than the NIC that
        // this probe came by: whatever came by the others is answered, too, before this is.
        core.nics.drain();
        fetch(core, &mut messages);
    }
    let _batch = (messages.len() > 1).then(|| core.control.batch());
    core.parallel.each(&messages, |(at, from, message)| handle(core, *at, *from, message));
}

fn fetch(core: &Core<Qp>, messages: &mut Vec<(LocalPort, ControlAddr, Message)>) {
    let ports = |nic| (0..core.nics.port_count(nic)).map(move |pair| LocalPort { nic, pair });
    for at in (0..core.nics.count()).flat_map(ports) {
        let Some(endpoint) = core.nics.endpoint_of(at) else { continue };
        let forged = endpoint.receive(core.control.key(), |from, bytes| {
            let mut rest = bytes;
            while let Ok((message, tail)) = Message::decode(rest) {
                messages.push((at, from, message));
                rest = tail;
            }
        });
        core.control.count_forged(forged);
        if endpoint.take_failed() {
            core.jobs.put(Job::MendEndpoint(at));
        }
    }
}

fn handle(core: &Arc<Core<Qp>>, at: LocalPort, from: ControlAddr, message: &Message) {
    let answer = |answer: &Message| {
        let peer = core.peers.known(message.from.incarnation);
        let class = peer.map_or(from.class, |peer| peer.class());
        core.control.send_from(&core.nics, at, ControlAddr { class, ..from }, answer)
    };
    match message.body {
        Body::Probe(_) => {
            if message.to.incarnation == core.incarnation {
                message.answer_probe().map(|ack| answer(&ack));
            }
        }
        Body::Moved => {
            if message.to.incarnation == core.incarnation {
                core.jobs.put(Job::ReadAliases);
            }
        }
        Body::AskKey(name) => {
            if message.to.incarnation == core.incarnation {
                let on = match core.nics.keys(name.nic, name.rkey) {
                    KeyAnswer::Known(row) => row.on,
                    KeyAnswer::NoRegion => Vec::new(),
                    KeyAnswer::Later => return, // the peer asks again
                };
                let body = Body::Keys(Keys::new(name, &on));
                answer(&Message { from: message.to, to: message.from, body });
            }
        }
        Body::Keys(keys) => keys_came(core, message, &keys),
        Body::ProbeAck(_) => core.jobs.put(Job::ProbeAck(at, *message)),
        _ => {
            let nic = core.nics.index_of(message.to.gid);
            let qp = nic.and_then(|nic| core.qps.get((nic, message.to.qpn)));
            let gate = qp.as_ref().map(|qp| (qp, qp.gate_now()));
            match gate {
                // Its program changes it just now: the peer says this again.
                Some((_, None)) => {}
                Some((_, Some(g))) if link::is_of_another(&g, message) => {
                    message.refusal(core.incarnation, RefuseReason::Misfit).map(|no| answer(&no));
                }
                Some((qp, Some(mut g))) if g.link.is_some() => link::message(qp, &mut g, message),
                // The peer has found us before we have found it; it says this again.
                Some((qp, Some(g))) if g.seeks.is_some() => core.jobs.put(Job::Hurry(qp.id())),
                _ => {
                    message
                        .refusal(core.incarnation, RefuseReason::UnknownQp)
                        .map(|refusal| answer(&refusal));
                }
            }
        }
    }
}

/// A peer has answered by which keys a region of its is known.
fn keys_came(core: &Core<Qp>, message: &Message, keys: &Keys) {
    let known = core.peers.known(message.from.incarnation);
    let Some(peer) = known.filter(|_| message.to.incarnation == core.incarnation) else { return };
    match keys.on() {
        [] => peer.keys.remove(keys.of.nic, keys.of.rkey),
        on => {
            peer.keys.insert([KeyRow { default: keys.of.nic, rkey: keys.of.rkey, on: on.to_vec() }])
        }
    }
}
