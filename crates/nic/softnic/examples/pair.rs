//! Speed of softnic between two processes, beside bare UDP sockets that carry the same datagrams.
//!
//! ```text
//!   cargo run --example pair -- [write|send|read|latency|write-latency|bare|bare-latency|all] [SECONDS]
//! ```
//!
//! `write`: 1 MiB WRITEs to a passive process. `send`, `read`: the same with SEND (both poll) and
//! READ. `latency`: 8-byte SENDs, both poll. `write-latency`: 8-byte WRITEs, both look at their
//! memory only. `bare`: GSO sends of 15 x 4,112 bytes, GRO receives, at most 1 MiB in flight.
//! `bare-latency`: a 24-byte message and a 20-byte answer to each, as the transport's message and
//! ACK, both polling.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use unbroken_fabric::Runtime;
use unbroken_softnic::{Config, Nic, SoftNics};
use unbroken_types::{
    Access, Gid, Mtu, PathAttr, QpCaps, QpState, QpType, SendFlags, SendOpcode, Sge, Wc,
};
use unbroken_verbs::{
    Cq, Device, DeviceEvent, DeviceQp, EventSink, MrKeys, QpInit, QpModify, RcModify, RecvWr,
    SendWr,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const MESSAGE: usize = 1 << 20;
const DEPTH: usize = 32;

struct Silent;

impl EventSink for Silent {
    fn event(&self, _: usize, event: DeviceEvent) {
        eprintln!("event: {event:?}");
    }
}

/// One end of the connection.
struct End {
    nic: Arc<Nic>,
    cq: Arc<Cq>,
    buf: Box<[u8]>,
    mr: MrKeys,
    qp: Arc<dyn DeviceQp>,
    remote: Remote,
    _nics: Arc<SoftNics>,
}

impl End {
    /// Waits, looking at our own memory only, until the peer has written `n` there (not as the
    /// first), then writes `n` to the peer's memory and polls for the completion. What
    /// `ib_write_lat` does.
    fn exchange(&self, n: u64, wait_for: Option<u64>) -> Result<bool> {
        let at = self.buf.as_ptr().cast::<u64>();
        let mut round = 0u32;
        // SAFETY: the first bytes of the buffer, aligned; the NIC writes them meanwhile.
        while wait_for.is_some_and(|w| unsafe { at.read_volatile() } != w) {
            round = round.wrapping_add(1);
            if round.is_multiple_of(1 << 20) && ended() {
                return Ok(false);
            }
            std::hint::spin_loop();
        }
        self.qp.post_send(&SendWr {
            wr_id: 1,
            opcode: SendOpcode::Write,
            flags: SendFlags::SIGNALED.with(SendFlags::INLINE),
            remote_addr: self.remote.addr,
            rkey: self.remote.rkey,
            inline_data: Some(&n.to_ne_bytes()),
            ..SendWr::default()
        })?;
        while self.poll()?.0 == 0 {}
        Ok(true)
    }
}

/// What the peer said of itself.
#[derive(Default)]
struct Remote {
    addr: u64,
    rkey: u32,
}

impl End {
    fn open(runtime: &str, host: &str) -> Result<End> {
        let nics = SoftNics::new(Config::host(Runtime::at(runtime.as_ref())?, host))?;
        let nic = nics.open(0, Arc::new(Silent))?;
        let memory = nics.memory();
        let pd = memory.alloc_pd()?;
        let buf = vec![1u8; MESSAGE].into_boxed_slice();
        let addr = buf.as_ptr() as u64;
        let mr = memory.reg_mr(pd, addr, MESSAGE as u64, addr, Access(15))?;
        let cq = Cq::new(4096, None);
        let qp = nic.create_qp(&QpInit {
            qp_type: QpType::Rc,
            caps: QpCaps {
                max_send_wr: 512,
                max_recv_wr: 512,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 64,
            },
            pd,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: None,
            sq_sig_all: false,
            suspend_on_error: false,
            wc_qpn: None,
            home: None,
            local_keys_of: None,
            control: false,
            standby: false,
            lane: None,
            management: false,
        })?;
        Ok(End { nic, cq, buf, mr, qp, remote: Remote::default(), _nics: nics })
    }

    fn hello(&self) -> String {
        format!(
            "{} {} {} {}",
            self.nic.gid().to_ip(),
            self.qp.qpn(),
            self.buf.as_ptr() as u64,
            self.mr.rkey
        )
    }

    fn connect(&mut self, hello: &str) -> Result<()> {
        let words: Vec<&str> = hello.split_whitespace().collect();
        let [ip, qpn, addr, rkey] = words[..] else {
            return Err(format!("'{hello}' is no hello").into());
        };
        self.remote = Remote { addr: addr.parse()?, rkey: rkey.parse()? };
        let steps = [
            RcModify {
                state: Some(QpState::Init),
                access: Some(Access(15)),
                ..RcModify::default()
            },
            RcModify {
                state: Some(QpState::Rtr),
                dest_qpn: Some(qpn.parse()?),
                rq_psn: Some(0),
                mtu: Some(Mtu::B4096),
                max_dest_rd_atomic: Some(16),
                min_rnr_timer: Some(1),
                ..RcModify::default()
            },
            RcModify {
                state: Some(QpState::Rts),
                sq_psn: Some(0),
                timeout: Some(14),
                retry_cnt: Some(7),
                rnr_retry: Some(7),
                max_rd_atomic: Some(16),
                ..RcModify::default()
            },
        ];
        for rc in steps {
            let path = (rc.state == Some(QpState::Rtr))
                .then_some(PathAttr::new(Gid::from_ip(ip.parse()?)));
            self.qp.modify(&QpModify { rc, path, ..QpModify::default() })?;
        }
        Ok(())
    }

    fn post(&self, opcode: SendOpcode, len: usize, inline: bool) -> Result<()> {
        let sges = [Sge { addr: self.buf.as_ptr() as u64, length: len as u32, lkey: self.mr.lkey }];
        self.qp.post_send(&SendWr {
            wr_id: 1,
            opcode,
            flags: if inline {
                SendFlags::SIGNALED.with(SendFlags::INLINE)
            } else {
                SendFlags::SIGNALED
            },
            imm_data: 0,
            remote_addr: self.remote.addr,
            rkey: self.remote.rkey,
            compare_add: 0,
            swap: 0,
            sges: &sges,
            inline_data: inline.then(|| &self.buf[..len]),
            ud: None,
        })?;
        Ok(())
    }

    fn post_recv(&self) -> Result<()> {
        let sges =
            [Sge { addr: self.buf.as_ptr() as u64, length: MESSAGE as u32, lkey: self.mr.lkey }];
        Ok(self.qp.post_recv(&RecvWr { wr_id: 2, sges: &sges })?)
    }

    /// Polls once; gives the numbers of completed sends and receives.
    fn poll(&self) -> Result<(usize, usize)> {
        let mut wcs = [Wc::default(); 64];
        let n = self.cq.poll(&mut wcs)?;
        if let Some(bad) = wcs[..n].iter().find(|wc| wc.status != 0) {
            return Err(format!("{bad:?}").into());
        }
        let recvs = wcs[..n].iter().filter(|wc| wc.wr_id == 2).count();
        Ok((n - recvs, recvs))
    }
}

/// The other process.
struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Peer {
    fn start(mode: &str, arg: &str) -> Result<Peer> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--peer", mode, arg])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (input, output) =
            (child.stdin.take().ok_or("no stdin")?, child.stdout.take().ok_or("no stdout")?);
        Ok(Peer { child, input, output: BufReader::new(output) })
    }

    fn read(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    fn write(&mut self, line: &str) -> Result<()> {
        Ok(writeln!(self.input, "{line}")?)
    }

    fn end(mut self) -> Result<()> {
        drop(self.input);
        self.child.wait()?;
        Ok(())
    }
}

fn read_line() -> Result<String> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    Ok(line.trim().to_owned())
}

/// Whether the parent has closed the pipe.
fn ended() -> bool {
    let mut p = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
    // SAFETY: one live entry.
    unsafe { libc::poll(&raw mut p, 1, 0) > 0 }
}

fn softnic(mode: &str, seconds: f64) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let runtime = dir.path().to_str().ok_or("a path that is not UTF-8")?;
    let mut end = End::open(runtime, "a")?;
    let mut peer = Peer::start(mode, runtime)?;
    let hello = peer.read()?;
    end.connect(&hello)?;
    peer.write(&end.hello())?;
    peer.read()?;
    let limit = Duration::from_secs_f64(seconds);
    if mode == "write-latency" {
        let mut times = Vec::new();
        let start = Instant::now();
        end.exchange(0, None)?;
        for n in 1.. {
            if start.elapsed() >= limit {
                break;
            }
            let t = Instant::now();
            end.exchange(n, Some(n - 1))?;
            times.push(t.elapsed());
        }
        report_latency("softnic write", &mut times);
    } else if mode == "latency" {
        let mut times = Vec::new();
        end.post_recv()?;
        let start = Instant::now();
        while start.elapsed() < limit {
            let t = Instant::now();
            end.post(SendOpcode::Send, 8, true)?;
            let mut received = 0;
            while received == 0 {
                received = end.poll()?.1;
            }
            times.push(t.elapsed());
            end.post_recv()?;
        }
        report_latency("softnic send", &mut times);
    } else {
        let opcode = match mode {
            "send" => SendOpcode::Send,
            "read" => SendOpcode::Read,
            _ => SendOpcode::Write,
        };
        let (mut posted, mut done) = (0usize, 0usize);
        let start = Instant::now();
        while start.elapsed() < limit {
            while posted - done < DEPTH {
                end.post(opcode, MESSAGE, false)?;
                posted += 1;
            }
            done += end.poll()?.0;
        }
        report_rate(&format!("softnic {mode}"), done * MESSAGE, start.elapsed());
    }
    peer.end()
}

fn softnic_peer(mode: &str, runtime: &str) -> Result<()> {
    let mut end = End::open(runtime, "b")?;
    println!("{}", end.hello());
    end.connect(&read_line()?)?;
    for _ in 0..if mode == "send" || mode == "latency" { 256 } else { 0 } {
        end.post_recv()?;
    }
    println!("ready");
    match mode {
        "write-latency" => {
            let mut n = 0;
            while end.exchange(n, Some(n))? {
                n += 1;
            }
        }
        "latency" => {
            let mut round = 0u32;
            loop {
                let (_, received) = end.poll()?;
                for _ in 0..received {
                    end.post(SendOpcode::Send, 8, true)?;
                    end.post_recv()?;
                }
                round = round.wrapping_add(1);
                if round.is_multiple_of(4096) && ended() {
                    return Ok(());
                }
            }
        }
        "send" => {
            let mut round = 0u32;
            loop {
                let (_, received) = end.poll()?;
                for _ in 0..received {
                    end.post_recv()?;
                }
                round = round.wrapping_add(1);
                if round.is_multiple_of(4096) && ended() {
                    return Ok(());
                }
            }
        }
        _ => {
            read_line()?;
        }
    }
    Ok(())
}

fn report_rate(what: &str, bytes: usize, time: Duration) {
    println!("{what:>20}: {:6.2} Gbit/s", bytes as f64 * 8.0 / time.as_secs_f64() / 1e9);
}

fn report_latency(what: &str, times: &mut [Duration]) {
    times.sort_unstable();
    let at = |q: f64| times[(times.len() as f64 * q) as usize].as_secs_f64() * 1e6 / 2.0;
    println!("{what:>20}: half round trip {:.2} us median, {:.2} us p99", at(0.5), at(0.99));
}

const SEGMENT: usize = 4112;
const RUN: usize = 15 * SEGMENT;

fn set(socket: &UdpSocket, level: i32, name: i32, value: i32) {
    // SAFETY: a live int of the length given.
    unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), 4) };
}

fn bare_socket(addr: &str) -> Result<UdpSocket> {
    let s = UdpSocket::bind(addr)?;
    set(&s, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, 8 << 20);
    Ok(s)
}

fn bare(seconds: f64) -> Result<()> {
    let s = bare_socket("127.0.0.1:0")?;
    let mut peer = Peer::start("bare", &s.local_addr()?.to_string())?;
    let to: SocketAddr = peer.read()?.parse()?;
    s.connect(to)?;
    set(&s, libc::SOL_UDP, 103, SEGMENT as i32);
    // As a transport does: a message of 1 MiB, not the same hot bytes again and again.
    let data = vec![1u8; MESSAGE / RUN * RUN];
    let mut ack = [0u8; 64];
    let (mut sent, mut acked) = (0usize, 0usize);
    s.set_nonblocking(true)?;
    let start = Instant::now();
    while start.elapsed().as_secs_f64() < seconds {
        if sent - acked < MESSAGE {
            s.send(&data[sent % data.len()..][..RUN])?;
            sent += RUN;
        }
        while let Ok(8) = s.recv(&mut ack[..8]) {
            acked = usize::from_le_bytes(ack[..8].try_into()?);
        }
    }
    report_rate("bare GSO/GRO UDP", acked / SEGMENT * 4096, start.elapsed());
    peer.end()
}

fn bare_peer(to: &str) -> Result<()> {
    let s = bare_socket("127.0.0.1:0")?;
    set(&s, libc::SOL_UDP, 104, 1);
    s.set_read_timeout(Some(Duration::from_millis(500)))?;
    println!("{}", s.local_addr()?);
    let mut buf = vec![0u8; 65_536];
    let mut total = 0usize;
    loop {
        match s.recv(&mut buf) {
            Ok(n) => {
                total += n;
                s.send_to(&total.to_le_bytes(), to)?;
            }
            Err(_) if ended() => return Ok(()),
            Err(_) => {}
        }
    }
}

/// Waits for a datagram of this length, polling.
fn spin(s: &UdpSocket, buf: &mut [u8], len: usize) -> bool {
    let mut round = 0u32;
    loop {
        if s.recv(buf).is_ok_and(|n| n == len) {
            return true;
        }
        round = round.wrapping_add(1);
        if round.is_multiple_of(65_536) && ended() {
            return false;
        }
    }
}

fn bare_latency(seconds: f64) -> Result<()> {
    let s = UdpSocket::bind("127.0.0.1:0")?;
    let mut peer = Peer::start("bare-latency", &s.local_addr()?.to_string())?;
    let to: SocketAddr = peer.read()?.parse()?;
    s.connect(to)?;
    s.set_nonblocking(true)?;
    let mut buf = [0u8; 64];
    let mut times = Vec::new();
    let start = Instant::now();
    while start.elapsed().as_secs_f64() < seconds {
        let t = Instant::now();
        s.send(&[0; 24])?;
        while !s.recv(&mut buf).is_ok_and(|n| n == 24) {}
        times.push(t.elapsed());
        s.send(&[0; 20])?;
    }
    report_latency("bare UDP with ACKs", &mut times);
    peer.end()
}

fn bare_latency_peer(to: &str) -> Result<()> {
    let s = UdpSocket::bind("127.0.0.1:0")?;
    println!("{}", s.local_addr()?);
    s.connect(to)?;
    s.set_nonblocking(true)?;
    let mut buf = [0u8; 64];
    while spin(&s, &mut buf, 24) {
        s.send(&[0; 24])?;
        s.send(&[0; 20])?;
    }
    Ok(())
}

/// With `PAIR_PIN` set, each process stays on a core of its own, for measuring on a machine that
/// does other things too.
fn pin(core: usize) {
    if std::env::var_os("PAIR_PIN").is_some() {
        // SAFETY: a CPU set is plain bits, for which zero is valid; the set is a live local of the
        // size given.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(core, &mut set);
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
        }
    }
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    pin(usize::from(args.first().is_some_and(|a| a == "--peer")));
    if let [flag, mode, arg] = &args[..] {
        if flag == "--peer" {
            return match mode.as_str() {
                "bare" => bare_peer(arg),
                "bare-latency" => bare_latency_peer(arg),
                _ => softnic_peer(mode, arg),
            };
        }
    }
    let mode = args.first().map_or("all", String::as_str);
    let seconds = args.get(1).map_or(Ok(2.0), |s| s.parse())?;
    let run = |mode: &str| match mode {
        "bare" => bare(seconds),
        "bare-latency" => bare_latency(seconds),
        "write" | "send" | "read" | "latency" | "write-latency" => softnic(mode, seconds),
        _ => Err(format!(
            "'{mode}' is no mode: write, send, read, latency, write-latency, bare, bare-latency \
             and all are"
        )
        .into()),
    };
    match mode {
        "all" => ["bare", "write", "send", "read", "bare-latency", "latency", "write-latency"]
            .into_iter()
            .try_for_each(run),
        mode => run(mode),
    }
}
