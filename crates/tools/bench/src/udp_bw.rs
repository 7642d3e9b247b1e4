//! Bandwidth of bare GSO/GRO UDP: what the carrier gives without a transport.
//!
//! One process sends to another over loopback, each with one thread, with the system calls that
//! softnic uses: `sendmmsg` of runs of 15 segments of 4,096 bytes, which the kernel carries as one
//! packet each (GSO), and `recvmmsg`, which takes them as such (GRO). The payload is not touched
//! otherwise, as iperf3 does not; with `--touch both` the sender copies each run out of a buffer of
//! 1 MiB and the receiver copies it into one, since a transport must look at the payload and bring
//! it to its place. The receiver acknowledges every 32 packets, and what is there when nothing more
//! is: 8 bytes that say how many payload bytes it has got. The sender keeps a fixed number of runs
//! in flight, and waits in `recv` when they are out. That is all: no sequence numbers, no checksum,
//! no retransmission. A run that is lost all the same is counted and its place is given back after
//! 100 ms. How much in flight is best depends on the machine's caches; [`best_window`] finds it.

use std::io::{BufRead, BufReader, IoSlice, IoSliceMut};
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{
    getsockopt, recv, recvmmsg, sendmmsg, setsockopt, sockopt, ControlMessage, MsgFlags,
    MultiHeaders, SockaddrIn,
};

use crate::Result;

/// Payload of a segment, as a RoCE packet of the largest MTU.
const SEGMENT_BYTES: usize = 4096;
/// Payload of a send: the most whole segments that an IP packet holds.
const SEND_BYTES: usize = 15 * SEGMENT_BYTES;
/// The buffers that are copied from and to, as of a message of 1 MiB.
const BUFFER_BYTES: usize = 1 << 20;
/// What a send needs in the receive buffer, with the kernel's own structures.
const SEND_TRUE_BYTES: usize = SEND_BYTES + SEND_BYTES / 4;
/// Windows that are tried, in runs.
const WINDOWS: [u32; 6] = [2, 4, 8, 16, 32, 64];
/// How long each is tried, twice.
const TRY_TIME: Duration = Duration::from_millis(150);
/// Runs that a system call sends or takes at most.
const BATCH: usize = 16;
/// Packets that one acknowledgement is for.
const ACK_PACKETS: u64 = 32;
/// Silence after which what is in flight is lost.
const LOSS_TIMEOUT: Duration = Duration::from_millis(100);

/// Which sides copy the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Touch {
    /// Sender and receiver.
    Both,
    /// The receiver.
    Receiver,
    /// None.
    None,
}

impl Touch {
    fn word(self) -> &'static str {
        match self {
            Touch::Both => "both",
            Touch::Receiver => "receiver",
            Touch::None => "none",
        }
    }
}

/// What was measured.
#[derive(Clone, Copy, Debug)]
pub struct Figure {
    /// Payload that arrived, in Gbit/s.
    pub gbps: f64,
    /// Sends that did not arrive.
    pub lost: u64,
}

/// A helper process of this program, killed when dropped.
pub struct Helper(Child);

impl Helper {
    /// Starts this program with `args`; returns it and the UDP port that it prints.
    pub fn start(args: &[&str]) -> Result<(Helper, u16)> {
        let mut child =
            Command::new(std::env::current_exe()?).args(args).stdout(Stdio::piped()).spawn()?;
        let stdout = child.stdout.take().ok_or("no pipe to the helper process")?;
        let helper = Helper(child);
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        Ok((
            helper,
            line.trim()
                .parse()
                .map_err(|_| format!("the helper process printed '{}'", line.trim()))?,
        ))
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends for `time` to a process of its own.
pub fn measure(time: Duration, window: Option<u32>, touch: Touch) -> Result<Figure> {
    let (_helper, port) = Helper::start(&["udp-bw-receiver", "--touch", touch.word()])?;
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.connect(("127.0.0.1", port))?;
    setsockopt(&socket, sockopt::UdpGsoSegment, &(SEGMENT_BYTES as i32))?;
    socket.set_read_timeout(Some(LOSS_TIMEOUT))?;
    // The receiver tells first how large its buffer is.
    socket.send(&[])?;
    let room =
        read_count(&socket, MsgFlags::empty())?.ok_or("the receiving process does not answer")?;
    let fits =
        (room / SEND_TRUE_BYTES as u64).clamp(1, u64::from(WINDOWS[WINDOWS.len() - 1])) as u32;
    send_all(&socket, time, window.map_or(fits, |w| w.min(fits)), touch)
}

/// The window with which most arrives here and now, of [`WINDOWS`].
pub fn best_window(touch: Touch) -> Result<u32> {
    let mut best = (0.0, WINDOWS[0]);
    // Forth and back, so that a change of the machine's speed favours none.
    let mut sums = [0.0; WINDOWS.len()];
    for n in (0..WINDOWS.len()).chain((0..WINDOWS.len()).rev()) {
        sums[n] += measure(TRY_TIME, Some(WINDOWS[n]), touch)?.gbps;
    }
    for (window, sum) in WINDOWS.into_iter().zip(sums) {
        if sum > best.0 {
            best = (sum, window);
        }
    }
    Ok(best.1)
}

fn send_all(socket: &UdpSocket, time: Duration, window: u32, touch: Touch) -> Result<Figure> {
    let window_bytes = u64::from(window.max(1)) * SEND_BYTES as u64;
    let source = vec![0x5a_u8; BUFFER_BYTES];
    let mut staging = vec![0_u8; SEND_BYTES * BATCH];
    let mut headers = MultiHeaders::<SockaddrIn>::preallocate(BATCH, None);
    let (mut sent, mut got, mut lost) = (0_u64, 0_u64, 0_u64);
    let start = Instant::now();
    while start.elapsed() < time {
        while let Some(count) = read_count(socket, MsgFlags::MSG_DONTWAIT)? {
            got = got.max(count);
        }
        let free = (window_bytes - (sent - got - lost).min(window_bytes)) as usize / SEND_BYTES;
        if free == 0 {
            match read_count(socket, MsgFlags::empty())? {
                Some(count) => got = got.max(count),
                None => lost = sent - got,
            }
            continue;
        }
        let runs = free.min(BATCH);
        for (n, run) in staging.chunks_exact_mut(SEND_BYTES).take(runs).enumerate() {
            if touch == Touch::Both {
                let at =
                    ((sent as usize / SEND_BYTES + n) % (BUFFER_BYTES / SEND_BYTES)) * SEND_BYTES;
                run.copy_from_slice(&source[at..at + SEND_BYTES]);
            }
        }
        sent += send_runs(socket, &mut headers, &staging[..runs * SEND_BYTES])?;
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(Figure { gbps: got as f64 * 8e-9 / seconds, lost: lost / SEND_BYTES as u64 })
}

/// Sends runs in one system call; gives the bytes of those that the kernel took.
fn send_runs(
    socket: &UdpSocket,
    headers: &mut MultiHeaders<SockaddrIn>,
    runs: &[u8],
) -> Result<u64> {
    let slices: Vec<[IoSlice<'_>; 1]> =
        runs.chunks_exact(SEND_BYTES).map(|run| [IoSlice::new(run)]).collect();
    let no_control: [ControlMessage<'_>; 0] = [];
    let nowhere = [None; BATCH];
    match sendmmsg(socket.as_raw_fd(), headers, &slices, nowhere, no_control, MsgFlags::empty()) {
        Ok(taken) => Ok((taken.count() * SEND_BYTES) as u64),
        Err(e) => Err(e.into()),
    }
}

/// Reads a count of bytes; None: nothing is there (or not within the socket's timeout).
fn read_count(socket: &UdpSocket, flags: MsgFlags) -> Result<Option<u64>> {
    let mut bytes = [0; 8];
    match recv(socket.as_raw_fd(), &mut bytes, flags) {
        Ok(8) => Ok(Some(u64::from_le_bytes(bytes))),
        Ok(n) => Err(format!("a datagram of {n} bytes came, expected 8").into()),
        Err(nix::errno::Errno::EAGAIN) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// The receiving process. Prints its port; ends when its parent does (it is killed) or after a
/// minute of silence.
pub fn receive(touch: Touch) -> Result<()> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    setsockopt(&socket, sockopt::UdpGroSegment, &true)?;
    // Root may have more than the system's limit, as softnic has.
    if setsockopt(&socket, sockopt::RcvBufForce, &(8 << 20)).is_err() {
        setsockopt(&socket, sockopt::RcvBuf, &(8 << 20))?;
    }
    let room = getsockopt(&socket, sockopt::RcvBuf)? as u64;
    socket.set_read_timeout(Some(Duration::from_secs(60)))?;
    println!("{}", socket.local_addr()?.port());
    let mut staging = vec![0_u8; BATCH << 16];
    let mut target = vec![0_u8; BUFFER_BYTES];
    let (_, peer) = socket.recv_from(&mut staging)?;
    socket.connect(peer)?;
    socket.send(&room.to_le_bytes())?;
    let mut headers = MultiHeaders::<SockaddrIn>::preallocate(BATCH, None);
    let (mut got, mut told) = (0_u64, 0_u64);
    loop {
        // Only where nothing is owed it may sleep.
        let flags = if got > told { MsgFlags::MSG_DONTWAIT } else { MsgFlags::MSG_WAITFORONE };
        let came = match receive_runs(&socket, &mut headers, &mut staging, flags) {
            Ok(came) => came,
            Err(Errno::EAGAIN) if got > told => Vec::new(),
            Err(Errno::EAGAIN | Errno::ECONNREFUSED) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        for (n, len) in came.iter().enumerate() {
            if touch != Touch::None {
                let at = (got as usize / SEND_BYTES % (BUFFER_BYTES / SEND_BYTES)) * SEND_BYTES;
                let len = (*len).min(BUFFER_BYTES - at);
                target[at..at + len].copy_from_slice(&staging[n << 16..][..len]);
                std::hint::black_box(&target);
            }
            got += *len as u64;
        }
        if came.is_empty() || got - told >= ACK_PACKETS * SEGMENT_BYTES as u64 {
            told = got;
            match socket.send(&got.to_le_bytes()) {
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionRefused => return Ok(()),
                other => other?,
            };
        }
    }
}

/// Takes what is there, at most [`BATCH`] runs, each into its 64 KiB of `staging`; gives their
/// lengths.
fn receive_runs(
    socket: &UdpSocket,
    headers: &mut MultiHeaders<SockaddrIn>,
    staging: &mut [u8],
    flags: MsgFlags,
) -> nix::Result<Vec<usize>> {
    let mut slices: Vec<[IoSliceMut<'_>; 1]> =
        staging.chunks_exact_mut(1 << 16).map(|run| [IoSliceMut::new(run)]).collect();
    let came = recvmmsg(socket.as_raw_fd(), headers, &mut slices, flags, None)?;
    Ok(came.map(|message| message.bytes).collect())
}
