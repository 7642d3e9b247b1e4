//! Probes for tracers (USDT: bpftrace, SystemTap, gdb): a nop each until somebody sets one.
//!
//! Their names and arguments are documented in docs/guide/monitoring.md, and scripts of users have
//! them.

use probe::probe;
use unbroken_events::{Switch, SwitchKind};

/// `unbroken:switch`: a logical QP has moved. Arguments: its QPN; the index of its NIC before, and
/// now; the epoch; 1 if it was planned; µs from the first sign to work on the new path; work
/// requests that were sent again.
#[inline]
pub(crate) fn switch(from: u8, to: u8, done: &Switch) {
    let planned = done.kind == SwitchKind::Planned;
    let (qp, epoch, us, again) = (done.qp, done.epoch, done.switch_us, done.replayed);
    probe!(unbroken, switch, qp, from, to, epoch, planned, us, again);
}

/// `unbroken:migration`: a physical QP has gone over to its alternate path. Arguments: the QPN, the
/// index of its NIC, the port that it uses now.
#[inline]
pub(crate) fn migration(qpn: u32, nic: usize, port: u8) {
    probe!(unbroken, migration, qpn, nic, port);
}
