//! Ping-pong between two hosts of the emulated network, which goes on when its NIC dies and comes
//! back when the NIC is well.
//!
//! ```text
//! cargo run --release --example pingpong              # both ends in one process, with a fault of its own
//! unbroken run --host b -- target/release/examples/pingpong --serve
//! unbroken run --host a -- target/release/examples/pingpong --peer ADDRESS
//! ```
//! The two programs print their addresses; the server reads its client's from standard input.

use std::io::BufRead;
use std::time::{Duration, Instant};
use unbroken::{Cq, Host, Qp, QpAddress, QpOptions, Region, Result, WcStatus};

const BYTES: usize = 4096;
const SECONDS: u64 = 5;
/// Receives that stand ready.
const RECEIVES: u64 = 4;
const RECV: u64 = 1 << 32;

/// One player.
struct Player {
    cq: Cq,
    qp: Qp,
    out: Region,
    into: Region,
}

impl Player {
    fn new(host: &Host) -> Result<Player> {
        let nic = host.open(0)?;
        let (pd, cq) = (nic.alloc_pd()?, nic.create_cq(64)?);
        let qp = pd.create_qp(&cq, &QpOptions::default())?;
        Ok(Player {
            qp,
            out: pd.register(BYTES)?,
            into: pd.register(RECEIVES as usize * BYTES)?,
            cq,
        })
    }

    fn connect(&self, peer: &QpAddress) -> Result<()> {
        (0..RECEIVES).try_for_each(|i| self.expect(i))?;
        self.qp.connect(peer)
    }

    fn expect(&self, i: u64) -> Result<()> {
        let at = (i % RECEIVES) as usize * BYTES;
        self.qp.recv(RECV + i, &self.into, at..at + BYTES)
    }

    fn hit(&self, n: u64) -> Result<()> {
        self.out.write(0, &n.to_le_bytes())?;
        self.qp.send(n, &self.out, 0..BYTES)
    }

    /// The number that came, if one has. Checks everything that completes.
    fn poll(&self) -> Result<Option<u64>> {
        let mut came = None;
        for wc in self.cq.poll(8)? {
            assert_eq!(wc.status, WcStatus::Success as u32, "work request {:#x} failed", wc.wr_id);
            if wc.wr_id >= RECV {
                let i = wc.wr_id - RECV;
                let at = (i % RECEIVES) as usize * BYTES;
                let word = self.into.read(at..at + 8)?;
                came = Some(u64::from_le_bytes(word.try_into().expect("eight bytes")));
                self.expect(i + RECEIVES)?;
            }
        }
        Ok(came)
    }

    /// Answers until nothing has come for a while; begins if it serves. Gives the rounds and the
    /// longest wait.
    fn play(&self, serves: bool, time: Duration) -> Result<(u64, Duration)> {
        let (began, mut last, mut longest, mut expected) =
            (Instant::now(), Instant::now(), Duration::ZERO, 0);
        if serves {
            self.hit(0)?;
        }
        loop {
            if let Some(n) = self.poll()? {
                assert_eq!(n, expected, "out of order");
                expected += 1;
                longest = longest.max(last.elapsed());
                last = Instant::now();
                // The one that serves goes on to the next number; the other sends back what came.
                if !serves || began.elapsed() < time {
                    self.hit(n + u64::from(serves))?;
                }
            } else if last.elapsed() > Duration::from_secs(2) {
                return Ok((expected, longest));
            }
        }
    }
}

fn both_ends() -> Result<()> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let hosts = ["a", "b"].map(|name| Host::emulated(folder.path(), name));
    let [a, b] = hosts.map(|host| host.and_then(|host| Player::new(&host)));
    let (a, b) = (a?, b?);
    a.connect(&b.qp.address())?;
    b.connect(&a.qp.address())?;
    let begun = Instant::now();
    let ends = [&a.qp, &b.qp];
    while let Some(not) = ends.iter().map(|qp| qp.protection()).find(|p| !p.is_protected()) {
        assert!(begun.elapsed() < Duration::from_secs(10), "{not}");
    }
    println!(
        "path {}; break it: UNBROKEN_RUNTIME={} unbroken fault set 'nic a/0 dead'",
        a.qp.path().expect("it is connected"),
        folder.path().display()
    );
    std::thread::scope(|scope| {
        let answers = scope.spawn(|| b.play(false, Duration::ZERO));
        let (rounds, longest) = a.play(true, Duration::from_secs(SECONDS))?;
        answers.join().expect("the other end")?;
        let path = a.qp.path().expect("it is connected");
        println!("{rounds} rounds, the longest took {longest:?}; path {path}");
        Ok(())
    })
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (serves, peer) = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => return both_ends(),
        ["--serve"] => (true, None),
        ["--peer", address] => (false, Some(address.parse::<QpAddress>()?)),
        _ => return Err(unbroken::Error::invalid("usage: pingpong [--serve | --peer ADDRESS]")),
    };
    let player = Player::new(&Host::from_env()?)?;
    println!("{}", player.qp.address());
    let peer = peer.map_or_else(
        || {
            std::io::stdin()
                .lock()
                .lines()
                .next()
                .and_then(|line| line.ok())
                .unwrap_or_default()
                .parse()
        },
        Ok,
    )?;
    player.connect(&peer)?;
    let (rounds, longest) = player.play(serves, Duration::from_secs(SECONDS))?;
    let path = player.qp.path().expect("it is connected");
    println!("{rounds} rounds, the longest took {longest:?}; path {path}");
    Ok(())
}
