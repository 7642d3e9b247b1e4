//! Writes the seed corpora: `seeds DIRECTORY` makes `DIRECTORY/packet` and `DIRECTORY/outside`. The same at every run.

mod world;

use std::path::Path;
use unbroken_directory::{NicRecord, ProcessRecord};
use unbroken_fabric::Shape;
use unbroken_types::{Gid, Mtu};
use world::kind;

fn main() -> std::io::Result<()> {
    let dir = std::env::args().nth(1).expect("usage: seeds DIRECTORY");
    packets(&Path::new(&dir).join("packet"))?;
    outside(&Path::new(&dir).join("outside"))
}

/// Exchanges of packets on live QPs.
fn packets(dir: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    let packets = world::sample_packets();
    let mut count = 0;
    let mut save = |input: &[u8]| {
        world::run(input);
        count += 1;
        std::fs::write(dir.join(format!("seed-{count:03}")), input)
    };
    let mut opcodes = std::collections::BTreeSet::new();
    for (n, (to, packet)) in packets.iter().enumerate() {
        // Each opcode once by itself, and now and then a stretch of the exchange.
        let alone = opcodes.insert((*to, packet[0]));
        if !alone && n % 40 != 0 {
            continue;
        }
        let mut input = vec![kind::RECV, *to as u8 | 8, kind::POST, *to as u8 | 4 << 1, kind::STEP, 0xe0];
        for (to, packet) in &packets[n..packets.len().min(n + if alone { 1 } else { 8 })] {
            put(&mut input, kind::PACKET, *to as u8 | 2, packet);
            input.extend([kind::STEP, 0x60]);
        }
        save(&input)?;
    }
    let datagram: Vec<u8> = [0x64, 0, 0xff, 0xff, 0, 0, 0, 3, 0, 0, 0, 0]
        .into_iter()
        .chain([0x11; 4])
        .chain([0, 0, 0, 9, 1, 2, 3, 4])
        .collect();
    let mut input = vec![];
    put(&mut input, kind::DATAGRAM, 0, &datagram);
    put(&mut input, kind::RAW, 0, &packets[0].1);
    save(&input)?;
    println!("{count} seeds in {}", dir.display());
    Ok(())
}

/// One of each kind of message, value and text.
fn outside(dir: &Path) -> std::io::Result<()> {
    use unbroken_path::message::{Body, Hello, Probe, Refuse, RefuseReason};
    use unbroken_path::{Endpoint, Message, SlotPath};
    std::fs::create_dir_all(dir)?;
    let end = |n: u32| Endpoint { gid: Gid([n as u8; 16]), qpn: n, incarnation: n.into() };
    let hello = Hello {
        epoch: 1,
        path: SlotPath { local: 1, remote: 2 },
        fresh_qpn: 0x10005,
        mtu: Mtu::B4096,
        heard: true,
        waiting: false,
        executed: 7,
        completed: 9,
    };
    let bodies = [
        Body::Hello(hello),
        Body::Probe(Probe { sequence: 1, sent_us: 2 }),
        Body::ProbeAck(Probe { sequence: 1, sent_us: 2 }),
        Body::Refuse(Refuse { reason: RefuseReason::UnknownQp, epoch: 1, refused: 3 }),
        Body::Bye,
        Body::Moved,
    ];
    let mut inputs: Vec<Vec<u8>> = Vec::new();
    for body in bodies {
        let mut bytes = vec![0];
        Message { from: end(5), to: end(6), body }.encode(&mut bytes);
        inputs.push(bytes);
    }
    let nics = vec![NicRecord { index: 0, gid: Gid([7; 16]), control_qpn: 9, name: "a/0".into() }; 2];
    let record = ProcessRecord { pid: 77, nics }.encode().expect("within the limits");
    inputs.push([&[1], &record[..]].concat());
    inputs.push([&[2], Shape::standard(77).to_toml().as_bytes()].concat());
    for fault in ["nic a/0 dead", "cable b/1 cut", "switch rail0 down", "loss a/0 1%", "rate a/0 10Gbit", "delay a/0 5ms tx"] {
        inputs.push([&[3], fault.as_bytes()].concat());
    }
    for (n, input) in inputs.iter().enumerate() {
        std::fs::write(dir.join(format!("seed-{n:03}")), input)?;
    }
    println!("{} seeds in {}", inputs.len(), dir.display());
    Ok(())
}

fn put(input: &mut Vec<u8>, kind: u8, arg: u8, bytes: &[u8]) {
    input.extend([kind, arg]);
    input.extend((bytes.len() as u16).to_be_bytes());
    input.extend(bytes);
}
