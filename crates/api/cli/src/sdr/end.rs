//! One end of a bench: its context, its queue pair, its reliable writes.

use std::net::IpAddr;
use std::time::Duration;

use super::bench::BenchArgs;
use crate::output::{Failure, Result};
use unbroken::Host;
use unbroken_fabric::Runtime;
use unbroken_sdr::{
    Attr, Choice, Context, ContextOptions, Qp, QpOptions, Reliable, ReliableOptions, Scheme,
};

pub(super) struct End {
    pub(super) context: Context,
    pub(super) qp: Qp,
    pub(super) reliable: Reliable,
}

pub(super) fn failed(error: unbroken_sdr::Error) -> Failure {
    Failure::Text(error.to_string())
}

/// The attributes that both ends have.
fn attr(args: &BenchArgs) -> Attr {
    // Segments of the longest message; twice as many in flight where there is parity beside each.
    let message_log2 =
        args.size.next_power_of_two().trailing_zeros().min(27).max(args.chunk.into()) as u8;
    let messages_log2 =
        (4 * args.in_flight.max(2)).next_power_of_two().trailing_zeros().min(10) as u8;
    Attr {
        chunk_log2: args.chunk,
        in_flight_log2: message_log2 + messages_log2,
        messages_log2,
        mtu_bytes: 1 << args.mtu,
        channels: args.channels,
        generations: 16,
        packet_lifetime_us: args.lifetime.as_micros() as u64,
        ..Attr::default()
    }
}

/// Which NICs an end has.
#[derive(Clone, Copy)]
pub(super) enum Nics<'a> {
    /// Those of a host of the emulated network.
    Of(&'a str),
    /// Those at addresses of this machine.
    At(&'a [IpAddr]),
    /// The RDMA devices that `unbroken run --devices` has named.
    Devices,
}

impl End {
    pub(super) fn new(runtime: &Runtime, nics: Nics<'_>, args: &BenchArgs) -> Result<End> {
        let host = match nics {
            Nics::Of(host) => Host::bare(runtime.path(), host),
            Nics::At(addresses) => Host::bare_at(runtime.path(), addresses),
            Nics::Devices => Host::bare_from_env(),
        };
        let host = host.map_err(|e| Failure::Text(e.to_string()))?;
        let all = if matches!(nics, Nics::Of(_)) { 1 } else { host.nic_count() };
        let nics = if args.nics.is_empty() { (0..all).collect() } else { args.nics.clone() };
        let options = ContextOptions { nics, channels: args.channels, ..ContextOptions::default() };
        let context = Context::open(&host, &options).map_err(failed)?;
        let qp = context
            .create_qp(&QpOptions { attr: attr(args), ..QpOptions::default() })
            .map_err(failed)?;
        let parity = match args.scheme.0 {
            Choice::Fixed(Scheme::Ec(code)) => code.parity() as f64 / code.data() as f64,
            Choice::Fixed(_) => 0.0,
            Choice::Adaptive(_) => 1.0,
        };
        let options = ReliableOptions {
            choice: args.scheme.0,
            parity: parity.min(1.0),
            rate_bps: args.rate.unwrap_or(0),
            deadline: args.deadline,
            scratch_messages: 4 * args.in_flight as usize,
            first_rtt: Duration::from_millis(20),
            ..ReliableOptions::default()
        };
        let reliable = Reliable::new(&qp, &options).map_err(failed)?;
        Ok(End { context, qp, reliable })
    }
}
