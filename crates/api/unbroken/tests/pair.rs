//! Two hosts of the emulated network in one process, over the public interface alone.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use unbroken::{Cq, Host, Protection, Qp, QpOptions, QpState, Region, RemoteRegion, WcStatus};

const PATIENCE: Duration = Duration::from_secs(20);

struct End {
    cq: Cq,
    qp: Qp,
    region: Region,
}

impl End {
    fn new(folder: &TempDir, name: &str, options: &QpOptions) -> End {
        let nic = Host::emulated(folder.path(), name).unwrap().open(0).unwrap();
        let (pd, cq) = (nic.alloc_pd().unwrap(), nic.create_cq(64).unwrap());
        let qp = pd.create_qp(&cq, options).unwrap();
        End { region: pd.register(8192).unwrap(), qp, cq }
    }

    /// The status of the next completion.
    fn next(&self) -> u32 {
        let began = Instant::now();
        loop {
            if let Some(wc) = self.cq.poll(1).unwrap().first() {
                return wc.status;
            }
            assert!(began.elapsed() < PATIENCE, "no completion");
        }
    }
}

fn pair(options: &QpOptions) -> (TempDir, End, End) {
    pair_in(folder(), options)
}

fn folder() -> TempDir {
    tempfile::tempdir_in(if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" }).unwrap()
}

fn pair_in(folder: TempDir, options: &QpOptions) -> (TempDir, End, End) {
    let ends = ["a", "b"].map(|name| End::new(&folder, name, options));
    ends[0].qp.connect(&ends[1].qp.address()).unwrap();
    ends[1].qp.connect(&ends[0].qp.address()).unwrap();
    let [a, b] = ends;
    (folder, a, b)
}

fn protected(qps: [&Qp; 2]) {
    let began = Instant::now();
    while let Some(not) = qps.iter().map(|qp| qp.protection()).find(|p| !p.is_protected()) {
        assert!(began.elapsed() < PATIENCE, "{not}");
    }
}

/// As a person would break it: the fault is set by another process.
fn kill_nic(folder: &TempDir) {
    unbroken_fabric::Fabric::open(&unbroken_fabric::Runtime::at(folder.path()).unwrap())
        .unwrap()
        .set(&"nic a/0 dead".parse().unwrap(), None)
        .unwrap();
}

fn work(a: &End, b: &End, there: &RemoteRegion, text: &[u8]) {
    a.region.write(0, text).unwrap();
    b.qp.recv(7, &b.region, 0..100).unwrap();
    a.qp.send(1, &a.region, 0..text.len()).unwrap();
    assert_eq!((a.next(), b.next()), (WcStatus::Success as u32, WcStatus::Success as u32));
    assert_eq!(b.region.read(0..text.len()).unwrap(), text);
    a.qp.write(2, &a.region, 0..text.len(), (there, 4096)).unwrap();
    assert_eq!(a.next(), WcStatus::Success as u32);
    a.qp.read(3, &a.region, 1000..1000 + text.len(), (there, 4096)).unwrap();
    assert_eq!(a.next(), WcStatus::Success as u32);
    assert_eq!(a.region.read(1000..1000 + text.len()).unwrap(), text);
}

#[test]
fn a_logical_qp_goes_on_when_its_nic_dies() {
    let (folder, a, b) = pair(&QpOptions::default());
    protected([&a.qp, &b.qp]);
    let there = b.region.remote();
    work(&a, &b, &there, b"before");
    kill_nic(&folder);
    work(&a, &b, &there, b"and after");
    let path = a.qp.path().unwrap();
    assert!(path.local != "a/0" && (1..4).contains(&path.epoch), "{path:?}");
    assert!(path.local.starts_with("a/") && path.remote.starts_with("b/"), "{path:?}");
    assert_eq!(path.to_string(), format!("{}-{}", path.local, path.remote));
}

#[test]
fn plain_devices_are_reached_by_the_address_that_leads_to_them() {
    let folder = folder();
    let mut shape = unbroken_fabric::Shape::standard(0);
    shape.kind.device = unbroken_fabric::DeviceKind::Plain;
    let runtime = unbroken_fabric::Runtime::at(folder.path()).unwrap();
    unbroken_fabric::Fabric::create(&runtime, &shape).unwrap();
    let (_folder, a, b) = pair_in(folder, &QpOptions::default().with_plain(true));
    work(&a, &b, &b.region.remote(), b"plain");
}

#[test]
fn notices_arrive_with_their_bytes_or_without() {
    let (_folder, a, b) = pair(&QpOptions::default().with_plain(true));
    for wr_id in 0..3 {
        b.qp.recv_notice(wr_id).unwrap();
    }
    let next = |end: &End| loop {
        if let Some(wc) = end.cq.poll(1).unwrap().first() {
            break *wc;
        }
    };
    a.region.write(0, b"here").unwrap();
    a.qp.write_imm(1, &a.region, 0..4, (&b.region.remote(), 100), 0x1234_5678).unwrap();
    let (sent, came) = (next(&a), next(&b));
    assert_eq!((sent.wr_id, sent.status), (1, WcStatus::Success as u32));
    assert_eq!(
        (came.wr_id, came.qp_num, u32::from_be(came.imm_data)),
        (0, b.qp.qpn(), 0x1234_5678)
    );
    let mut bytes = [0; 4];
    b.region.read_into(100, &mut bytes).unwrap();
    assert_eq!(&bytes, b"here");
    a.qp.notify(2, 9).unwrap();
    assert_eq!((next(&a).wr_id, u32::from_be(next(&b).imm_data)), (2, 9));
    a.qp.probe(3).unwrap();
    assert_eq!((next(&a).status, b.cq.poll(1).unwrap().len()), (WcStatus::Success as u32, 0));
    let wrong = a.qp.write_imm(4, &a.region, 0..4, (&b.region.remote(), 8190), 0).unwrap_err();
    assert!(wrong.to_string().contains("4 bytes at 8190 of a remote region of 8192"), "{wrong}");
    b.qp.fail().unwrap();
    assert_eq!(next(&b).status, WcStatus::WrFlushErr as u32);
}

#[test]
fn memory_may_be_registered_with_several_nics() {
    let (folder, a, b) = pair(&QpOptions::default().with_plain(true));
    let host = Host::emulated(folder.path(), "b").unwrap();
    let other = host.open(1).unwrap();
    let access = unbroken::Access::LOCAL_WRITE.with(unbroken::Access::REMOTE);
    let twin = b.region.also(&other.alloc_pd().unwrap(), access).unwrap();
    assert!(other.has_link());
    a.region.write(0, b"one memory").unwrap();
    a.qp.write(1, &a.region, 0..10, (&b.region.remote(), 0)).unwrap();
    assert_eq!(a.next(), WcStatus::Success as u32);
    assert_eq!(twin.read(0..10).unwrap(), b"one memory");
}

#[test]
fn a_plain_qp_fails_with_its_nic() {
    let (folder, a, b) = pair(&QpOptions::default().with_plain(true));
    let reason = "it was made without protection".into();
    assert_eq!(a.qp.protection(), Protection::Unprotected { reason });
    assert_eq!(a.qp.path(), None);
    work(&a, &b, &b.region.remote(), b"well");
    a.qp.recv(9, &a.region, 0..10).unwrap();
    kill_nic(&folder);
    assert_eq!(a.next(), WcStatus::WrFlushErr as u32);
    assert_eq!(a.qp.state(), QpState::Err);
}

#[test]
fn wrong_use_is_an_error_that_says_so() {
    let (_folder, a, b) = pair(&QpOptions::default());
    let there = b.region.remote();
    for (error, says) in [
        (a.qp.send(1, &a.region, 8000..9000).unwrap_err(), "bytes 8000..9000 of a region of 8192"),
        (
            a.qp.write(1, &a.region, 0..10, (&there, 8190)).unwrap_err(),
            "10 bytes at 8190 of a remote region of 8192",
        ),
        (a.qp.connect(&b.qp.address()).unwrap_err(), ""),
    ] {
        assert!(error.to_string().contains(says), "{error}");
    }
}

/// The example of the documentation, whose NIC is killed from outside in mid-game and comes back.
#[test]
fn the_example_outlives_its_nic() {
    let example = std::env::current_exe()
        .unwrap()
        .parent()
        .unwrap()
        .parent()
        .unwrap()
        .join("examples/pingpong");
    let mut game = Command::new(example).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(game.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    let first = lines.next().unwrap();
    let folder = first.split("UNBROKEN_RUNTIME=").nth(1).unwrap().split(' ').next().unwrap();
    let runtime = unbroken_fabric::Runtime::at(Path::new(folder)).unwrap();
    let fabric = unbroken_fabric::Fabric::open(&runtime).unwrap();
    fabric.set(&"nic a/0 dead".parse().unwrap(), None).unwrap();
    let last = lines.next().unwrap();
    let elsewhere = (1..4).any(|rail| last.contains(&format!("a/{rail}-b/{rail}")));
    assert!(game.wait().unwrap().success() && last.contains(" rounds, ") && elsewhere, "{last}");
}
