//! Half round trip of bare UDP with the datagrams that an RDMA ping-pong of 8 bytes exchanges.
//!
//! An RC SEND of 8 bytes is a UDP payload of 24 bytes (BTH 12, data 8, ICRC 4), and each is
//! answered, besides the message that goes back, by an ACK of 20 bytes (BTH 12, AETH 4, ICRC 4).
//! Here two processes do just that with plain sockets: whoever gets a message sends its own
//! message, then the ACK. `--plain` leaves the ACKs out: a mere ping-pong. No checksum, no state.
//! The sides wait either busily (`recv` in a loop without blocking, as `ib_send_lat` polls its CQ)
//! or in a blocking `recv` (as the background thread must that serves `ib_write_lat`). Each process
//! has a core of its own where there are two, as the RDMA programs have, which spin: two that sleep
//! in turn would else share one, and be faster than any two on different cores.

use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sched::{sched_getaffinity, sched_setaffinity, CpuSet};
use nix::sys::socket::{recv, MsgFlags};
use nix::unistd::Pid;

use crate::udp_bw::Helper;
use crate::Result;

const MESSAGE_BYTES: usize = 24;
const ACK_BYTES: usize = 20;
/// Round trips before the clock runs.
const WARM_UP: u32 = 1_000;
/// A datagram that has not come by then is lost, which loopback does not do.
const LOSS_TIMEOUT: Duration = Duration::from_secs(10);

/// How a side waits for a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Wait {
    /// It asks again and again.
    Busy,
    /// It sleeps in the kernel.
    Blocking,
}

impl Wait {
    fn word(self) -> &'static str {
        match self {
            Wait::Busy => "busy",
            Wait::Blocking => "blocking",
        }
    }
}

/// Half round trips.
#[derive(Clone, Copy, Debug)]
pub struct Figure {
    /// The median in µs.
    pub typical_us: f64,
    /// The 99th percentile in µs.
    pub p99_us: f64,
}

/// Plays `count` round trips with a process of its own.
pub fn measure(count: u32, wait: Wait, plain: bool) -> Result<Figure> {
    let args = ["udp-lat-echo", "--wait", wait.word(), "--plain"];
    let (_helper, port) = Helper::start(if plain { &args } else { &args[..3] })?;
    let _pinned = Pinned::to(0)?;
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.connect(("127.0.0.1", port))?;
    socket.set_read_timeout(Some(LOSS_TIMEOUT))?;
    let mut times_us = Vec::with_capacity(count as usize);
    for round in 0..count.saturating_add(WARM_UP) {
        let start = Instant::now();
        socket.send(&[1; MESSAGE_BYTES])?;
        if round > 0 && !plain {
            socket.send(&[2; ACK_BYTES])?;
        }
        if !await_message(&socket, wait)? {
            return Err("the other process went silent".into());
        }
        if round >= WARM_UP {
            times_us.push(start.elapsed().as_secs_f64() * 1e6 / 2.0);
        }
    }
    times_us.sort_by(f64::total_cmp);
    let at = |share: f64| {
        times_us
            .get(((times_us.len() as f64 * share) as usize).min(times_us.len().saturating_sub(1)))
    };
    let (typical_us, p99_us) = (at(0.5), at(0.99));
    Ok(Figure { typical_us: *typical_us.ok_or("no rounds")?, p99_us: *p99_us.ok_or("no rounds")? })
}

/// The answering process. Prints its port; ends when it is killed or after silence.
pub fn echo(wait: Wait, plain: bool) -> Result<()> {
    let _pinned = Pinned::to(1)?;
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.set_read_timeout(Some(LOSS_TIMEOUT))?;
    println!("{}", socket.local_addr()?.port());
    let mut first = [0; MESSAGE_BYTES];
    let (_, peer) = socket.recv_from(&mut first)?;
    socket.connect(peer)?;
    loop {
        socket.send(&[1; MESSAGE_BYTES])?;
        if !plain {
            socket.send(&[2; ACK_BYTES])?;
        }
        if !await_message(&socket, wait)? {
            return Ok(());
        }
    }
}

/// Takes datagrams until one is a message. False: silence.
fn await_message(socket: &UdpSocket, wait: Wait) -> Result<bool> {
    let mut bytes = [0; 64];
    let flags = if wait == Wait::Busy { MsgFlags::MSG_DONTWAIT } else { MsgFlags::empty() };
    let mut empty = 0_u32;
    let start = Instant::now();
    loop {
        match recv(socket.as_raw_fd(), &mut bytes, flags) {
            Ok(MESSAGE_BYTES) => return Ok(true),
            Ok(_) => {}
            Err(Errno::EAGAIN) if wait == Wait::Blocking => return Ok(false),
            Err(Errno::EAGAIN) => {
                // The clock is asked seldom, so that it costs nothing.
                empty += 1;
                if empty.is_multiple_of(4096) && start.elapsed() > LOSS_TIMEOUT {
                    return Ok(false);
                }
            }
            Err(Errno::ECONNREFUSED) => return Ok(false),
            Err(e) => return Err(e.into()),
        }
    }
}

/// Keeps this thread on one core, and gives it back its cores when dropped.
struct Pinned(CpuSet);

impl Pinned {
    /// Keeps it on the `nth` of its cores, counted around.
    fn to(nth: usize) -> Result<Pinned> {
        let this = Pid::from_raw(0);
        let all = sched_getaffinity(this)?;
        let cores: Vec<usize> =
            (0..CpuSet::count()).filter(|core| all.is_set(*core).unwrap_or(false)).collect();
        let core = cores.get(nth % cores.len().max(1)).ok_or("this process may run on no core")?;
        let mut one = CpuSet::new();
        one.set(*core)?;
        sched_setaffinity(this, &one)?;
        Ok(Pinned(all))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = sched_setaffinity(Pid::from_raw(0), &self.0);
    }
}
