//! How a logical QP is made, and whether failover protects it.

use super::{Gate, Holds, Qp, QpRequest};
use crate::contexts::ContextState;
use crate::core::Core;
use crate::datagram::Datagram;
use crate::fitness::{self, Unfit};
use crate::plain;
use crate::random;
use crate::worker_queue::Job;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::Arc;
use unbroken_types::{Gid, QpCaps, QpType};
use unbroken_verbs::{IdleHook, Lane, QpInit, QpModify, Result, ResumableQp};

impl Qp {
    /// Makes a QP of that context. The CQs of one that failover protects get a hook of `idle_hook`,
    /// for polls that find nothing.
    pub(crate) fn create(
        core: &Arc<Core<Qp>>,
        context: &Arc<ContextState>,
        r: &QpRequest,
        idle_hook: impl Fn() -> IdleHook,
    ) -> Result<Arc<Qp>> {
        core.process.check()?;
        let nic = context.nic;
        let protection = protection(core, nic, r);
        let protect = protection.is_ok();
        // A UD QP that begins elsewhere shows the addresses of its default NIC from the first.
        let home = (protect && r.qp_type == QpType::Ud && core.nics.device(nic).is_none())
            .then(|| core.nics.gid(nic));
        let init = physical(r, nic, protect, home);
        let (at, phys) = match &context.own {
            Some(device) => (nic, core.make_qp_on(device, nic, nic, &init)?),
            None => core.make_qp(nic, &init, protect)?,
        };
        let datagram = match r.qp_type {
            QpType::Ud if protect => Some(Datagram::new(&core.nics, nic, at)?),
            _ => None,
        };
        let why_not = match protection {
            Ok(()) if r.qp_type == QpType::Rc => "not connected",
            Ok(()) => "",
            Err(why_not) => why_not,
        };
        let qpn = phys.qpn();
        let carrier = phys.carrier();
        let lane = init.lane.clone().filter(|_| carrier.is_some());
        if let Some(lane) = &lane {
            lane.carry_by(carrier);
        }
        let unfit = Unfit::default();
        let others = (0..core.nics.count()).filter(|other| protect && *other != nic);
        for other in others {
            if let Some(why) = fitness::lacks(&core.nics.attr(other), &init) {
                unfit.add(other);
                core.tell_unfit(other, &why);
            }
        }
        let qp = Arc::new(Qp {
            core: core.clone(),
            context: Arc::downgrade(context),
            nic,
            qpn,
            // Its later lives have other numbers, as those of any QP.
            init: QpInit { wc_qpn: Some(qpn), management: false, ..init },
            unfit,
            is_plain: r.plain,
            idle: AtomicBool::new(!r.plain),
            lane: lane.clone(),
            in_verb_since_us: AtomicU64::new(0),
            gate: parking_lot::Mutex::new(Gate::new(phys, at, datagram, why_not, lane)),
            cookie: AtomicU64::new(r.cookie),
        });
        if protect {
            for cq in [&r.send_cq, &r.recv_cq] {
                cq.set_idle_hook(idle_hook());
            }
            if r.qp_type == QpType::Rc {
                let connection = qp.gate().connection;
                qp.publish_connection(connection);
            }
        }
        if r.qp_type == QpType::Ud {
            core.aliases.join();
            core.jobs.put(Job::ReadAliases);
        }
        core.qps.add(qp.id(), &qp, (at, qpn));
        if r.qp_type == QpType::Ud && at != nic {
            core.jobs.put(Job::Moved(qp.id()));
        }
        Ok(qp)
    }
}

impl Gate {
    /// That of a QP whose physical one, just made, is on NIC `nic`.
    fn new(
        phys: Arc<dyn ResumableQp>,
        nic: usize,
        datagram: Option<Box<Datagram>>,
        why_not: &'static str,
        lane: Option<Arc<Lane>>,
    ) -> Gate {
        Gate {
            phys,
            nic,
            port: 1,
            on_pair_since_us: 0,
            left_port: None,
            looked_at: None,
            sent: (0, 0),
            app: QpModify::default(),
            link: None,
            datagram,
            why_not,
            seeks: None,
            failed: false,
            told_lost: false,
            destroyed: false,
            holds: Holds::new(lane),
            backup: None,
            connection: random::number(),
            alias: None,
        }
    }
}

/// Whether failover protects such a QP of NIC `nic` (an RC QP: once it is connected), or why it
/// does not.
fn protection(core: &Core<Qp>, nic: usize, r: &QpRequest) -> std::result::Result<(), &'static str> {
    // A QP that is connected can go to another NIC of its peer.
    let elsewhere = core.nics.count() > 1 || r.qp_type == QpType::Rc;
    match r.qp_type {
        _ if !core.settings.failover => Err("failover is off"),
        _ if r.plain => Err("it was made without protection"),
        QpType::Uc => Err("UC QPs are not protected"),
        _ if !core.nics.holds(nic) => Err(plain::NO_JOURNAL),
        _ if !elsewhere => Err("the host has one NIC only"),
        QpType::Rc => Ok(()),
        QpType::Ud if !core.nics.moves_datagrams() => {
            Err("UD QPs of devices with plain verbs are not protected")
        }
        QpType::Ud if !core.watched() => Err("the thread for failover could not be started"),
        QpType::Ud => Ok(()),
    }
}

/// What the first physical QP is made with.
fn physical(r: &QpRequest, nic: usize, protect: bool, home: Option<Gid>) -> QpInit {
    QpInit {
        qp_type: r.qp_type,
        caps: if r.srq.is_some() {
            QpCaps { max_recv_wr: 0, max_recv_sge: 0, ..r.caps }
        } else {
            r.caps
        },
        pd: r.pd,
        send_cq: r.send_cq.clone(),
        recv_cq: r.recv_cq.clone(),
        srq: r.srq.clone(),
        sq_sig_all: r.sq_sig_all,
        suspend_on_error: protect,
        wc_qpn: None,
        home,
        local_keys_of: Some(nic as u8),
        control: false,
        standby: false,
        lane: (protect && r.qp_type == QpType::Rc).then(Lane::new),
        management: r.management,
    }
}
