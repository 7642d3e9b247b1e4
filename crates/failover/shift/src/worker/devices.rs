//! What devices tell: their death, their ports, and QPs that the network has stopped.

use super::Worker;
use crate::async_events::{event_type, AsyncElement};
use crate::control_endpoint::LocalPort;
use crate::datagram;
use crate::link;
use crate::port_pairs;
use crate::qp::Qp;
use crate::worker_queue::Job;
use std::sync::Arc;
use unbroken_events::What;
use unbroken_failover_protocol::health::{Answer, Verdict};
use unbroken_failover_protocol::{PortPath, Reason};
use unbroken_runtime::now_us;
use unbroken_types::WcStatus;
use unbroken_verbs::DeviceEvent;

impl Worker {
    pub(super) fn device_event(&mut self, nic: usize, event: DeviceEvent) {
        let core = self.core.clone();
        match event {
            DeviceEvent::Fatal => {
                core.events.emit(What::DeviceFatal { nic: core.nics.name(nic) });
                self.set_nic(nic, false);
                self.suspect_all(nic, None, Reason::DeviceFatal);
                self.tell_lost(nic);
                core.nics.drop_device(nic);
                core.publish_process();
                self.report_to_application(nic, event_type::DEVICE_FATAL, AsyncElement::Device);
            }
            DeviceEvent::PortDown(port) => {
                core.events.emit(What::PortDown { nic: core.nics.port_name(nic, port) });
                self.set_port(nic, port, false);
                self.suspect_all(nic, Some(port), Reason::PortDown);
                self.report_to_application(nic, event_type::PORT_ERR, AsyncElement::Port(port));
            }
            DeviceEvent::PortActive(port) => self.port_active(nic, port),
            DeviceEvent::PortChanged(port, event) => {
                if core.nics.look_at_lids(nic) {
                    core.publish_process();
                }
                core.contexts.raise(nic, event as u32, AsyncElement::Port(port), |_| true);
            }
            DeviceEvent::QpChanged { qpn } => {
                if let Some(qp) = core.qps.by_physical((nic, qpn)) {
                    let Some(g) = qp.gate_now() else {
                        return self.deferred.push(Job::Device(nic, event));
                    };
                    if (g.nic, g.phys.qpn()) == (nic, qpn) {
                        let _told_on_the_way = g.phys.progress();
                    }
                }
            }
            DeviceEvent::CqOverran => {
                if let Some(device) = core.nics.device(nic) {
                    device.find_overruns();
                }
            }
            DeviceEvent::UnknownSender => self.moved_qps.want(),
            DeviceEvent::QpFailed { qpn, status } => self.qp_failed(nic, qpn, status),
            DeviceEvent::Qp { qpn, event: of_qp } => {
                let Some(qp) = core.qps.by_physical((nic, qpn)) else { return };
                if qp.gate_now().is_none() {
                    return self.deferred.push(Job::Device(nic, event));
                }
                if let Some(what) = qp.report(of_qp) {
                    core.events.defer(what, now_us());
                }
            }
        }
    }

    /// The log is to have the QPs that end with that NIC, as nothing protects them.
    fn tell_lost(&self, nic: usize) {
        let of_it = |qp: Arc<Qp>| {
            let mut g = qp.gate_now()?;
            match g.nic == nic {
                true => qp.ends_with_nic(&mut g),
                false => None,
            }
        };
        self.core.events.emit_all(self.core.qps.all().into_iter().filter_map(of_it));
    }

    /// The network has stopped a QP: its device is dead, or its transport has given up, which is a
    /// question to its path.
    fn qp_failed(&mut self, nic: usize, qpn: u32, status: WcStatus) {
        let Some(qp) = self.core.qps.by_physical((nic, qpn)) else { return };
        let Some(mut g) = qp.gate_now() else {
            // It has failed all the same.
            let event = DeviceEvent::QpFailed { qpn, status };
            return self.deferred.push(Job::Device(nic, event));
        };
        if (g.nic, g.phys.qpn()) != (nic, qpn) || g.is_destroyed() {
            return; // a life that is over
        }
        if g.datagram.is_some() {
            datagram::leave(&qp, &mut g, Reason::DeviceFatal);
        } else if g.link.is_none() && qp.begins_elsewhere(&mut g) {
            // Nobody has seen anything of it.
        } else if g.link.is_none() && qp.holds_failure(&mut g, status) {
            self.core.jobs.put(Job::Hurry(qp.id()));
        } else if g.link.is_none() {
            g.failed = false;
            g.phys.fail(status);
        } else if status == WcStatus::FatalErr {
            link::suspect(&qp, &mut g, Reason::DeviceFatal);
        } else if let Some((peer, path)) = link::gave_up(&qp, &mut g, status) {
            let (clock_us, port_path) =
                (self.clock_us(), PortPath { path, port_pair: port_pairs::pair_of(g.port) });
            if self.repeats.entry(nic).or_default().fails(clock_us, status) {
                // It is not gone back to at once.
                peer.health().fails(clock_us, port_path);
                return link::suspect(&qp, &mut g, Reason::QpFailed(status));
            }
            let answer = peer.health().ask(clock_us, port_path, clock_us);
            if answer == Answer::Dead {
                link::verdict(&qp, &mut g, clock_us, port_path, Verdict::Dead);
            }
        }
    }

    /// A NIC of ours works again, or no longer does.
    fn set_nic(&mut self, nic: usize, works: bool) {
        let clock_us = self.clock_us();
        for peer in self.core.peers.all() {
            peer.health().set_nic(clock_us, nic as u8, works);
        }
    }

    /// One of its ports does, or does not.
    fn set_port(&mut self, nic: usize, port: u8, works: bool) {
        let clock_us = self.clock_us();
        for peer in self.core.peers.all() {
            peer.health().set_port(clock_us, nic as u8, port_pairs::pair_of(port), works);
        }
        self.tend_at_us = 0;
    }

    /// Every QP on that NIC, or on one port of it, must leave it; the others must not choose it.
    fn suspect_all(&mut self, nic: usize, port: Option<u8>, reason: Reason) {
        let (core, clock_us) = (self.core.clone(), self.clock_us());
        let _batch = core.control.batch();
        core.parallel.each(&core.qps.all(), |qp| {
            // One that a program changes just now finds out by itself.
            let Some(mut g) = qp.gate_now() else { return };
            if g.link.is_some() {
                link::beliefs_changed(qp, &mut g);
                let on_it = g.nic == nic && port.is_none_or(|port| port == g.port);
                let leaves =
                    |port| port_pairs::leave(qp, &mut g, clock_us, port_pairs::pair_of(port));
                if on_it && !port.is_some_and(leaves) {
                    link::suspect(qp, &mut g, reason);
                }
            } else if g.nic == nic && port.is_none_or(|port| port == g.port) {
                datagram::leave(qp, &mut g, reason);
            }
        });
    }

    /// The application hears of a fault that no switch absorbs for it. One that has made a
    /// protection domain and has no QP is about to use what stands in for the NIC, also where it
    /// has ended that domain again; one that has never made anything only watches, and is told all.
    fn report_to_application(&self, nic: usize, event: u32, element: AsyncElement) {
        let core = &self.core;
        let absorbed = core.settings.failover
            && (core.nics.count() > 1 || core.nics.port_count(nic) > 1)
            && core.nics.holds(nic)
            && !core.settings.show_events
            && core
                .qps
                .all()
                .iter()
                .filter(|q| q.id().0 == nic)
                .all(|q| q.gate_now().is_some_and(|g| q.absorbs(&g)));
        core.contexts.raise(nic, event, element, |context| !absorbed || context.only_watches());
    }

    fn port_active(&mut self, nic: usize, port: u8) {
        let core = self.core.clone();
        core.events.emit(What::PortActive { nic: core.nics.port_name(nic, port) });
        if core.nics.device(nic).is_none() || core.nics.endpoint(nic).is_none() {
            let opened = if core.settings.failover {
                core.nics.open_endpoint(nic)
            } else {
                core.nics.open(nic).map(drop)
            };
            if let Err(e) = opened {
                core.events
                    .complain(&format!("{} is back but cannot be opened", core.nics.name(nic)), &e);
                return;
            }
        }
        if core.settings.failover {
            core.nics.look_at_lids(nic);
            core.publish_process();
            self.set_port(nic, port, true);
            // A NIC that was dead is back with all its ports that have a link.
            for pair in 0..core.nics.port_count(nic) {
                if core.nics.port_works(LocalPort { nic, pair }) {
                    self.set_port(nic, pair + 1, true);
                }
            }
            for qp in core.qps.all() {
                let Some(mut g) = qp.gate_now() else { continue };
                link::beliefs_changed(&qp, &mut g);
                datagram::nic_back(&qp, &mut g);
            }
        }
        core.contexts.raise(nic, event_type::PORT_ACTIVE, AsyncElement::Port(port), |_| true);
    }
}
