//! Writes the seed corpora: `seeds DIRECTORY` makes `DIRECTORY/packet`, `DIRECTORY/control` and
//! `DIRECTORY/outside`. The same at every run.

mod control;
mod world;

use std::path::Path;
use unbroken_directory::{NicRecord, PortRecord, ProcessRecord};
use unbroken_fabric::Shape;
use unbroken_types::{Gid, Mtu};
use world::kind;

fn main() -> std::io::Result<()> {
    let dir = std::env::args().nth(1).expect("usage: seeds DIRECTORY");
    packets(&Path::new(&dir).join("packet"))?;
    switches(&Path::new(&dir).join("control"))?;
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
        let mut input =
            vec![kind::RECV, *to as u8 | 8, kind::POST, *to as u8 | 4 << 1, kind::STEP, 0xe0];
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

/// Switches that go as they should, and what a peer may say in the middle of one.
fn switches(dir: &Path) -> std::io::Result<()> {
    use control::step::*;
    std::fs::create_dir_all(dir)?;
    let noticed = [SHELL, 0xff, 3, 4, 5, SUSPECT, 0x00];
    let follows = [HELLO, 2, 1, 0, 0, 0];
    let heard = [HELLO, 3, 0, 0, 2, 0];
    let inputs: [&[&[u8]]; 8] = [
        &[&noticed, &heard, &[PROGRESS, 0], &noticed, &heard],
        &[&[SHELL, 0xff, 0, 2, 2], &follows, &heard, &[WAIT, 10, PROGRESS, 0]],
        &[&noticed, &[REFUSE, 0, 0, WAIT, 0, WAIT, 0, REFUSE, 2, 0]],
        &[&noticed, &[WAIT, 0, WAIT, 0, WAIT, 255, BYE, 0]],
        &[&[SHELL, 0xfb, 0, 0, 3], &noticed[5..], &heard],
        &[&noticed, &heard, &[CLOSE, 0], &heard],
        &[&[SUSPECT, 0x40], &heard, &[SUSPECT, 0x40], &heard, &[SUSPECT, 0x40], &heard],
        &[
            &noticed,
            &[HELLO, 0x92, 1, 0, 0, 0, HELLO, 0xc2, 1, 0, 0, 0, RECONNECT, 4, BELIEVE, 0, PROBE, 1],
        ],
    ];
    for (n, input) in inputs.iter().enumerate() {
        let input = input.concat();
        control::run(&input);
        std::fs::write(dir.join(format!("seed-{n:03}")), input)?;
    }
    println!("{} seeds in {}", inputs.len(), dir.display());
    Ok(())
}

/// One of each kind of message, value and text.
fn outside(dir: &Path) -> std::io::Result<()> {
    use unbroken_failover_protocol::message::{Body, Hello, Probe, Refuse, RefuseReason};
    use unbroken_failover_protocol::{Endpoint, Message, SlotPath};
    use unbroken_types::Messages;
    std::fs::create_dir_all(dir)?;
    let end =
        |n: u32| Endpoint { gid: Gid([n as u8; 16]), qpn: n, incarnation: n.into(), connection: 3 };
    let hello = Hello {
        epoch: 1,
        path: SlotPath { local: 1, remote: 2 },
        fresh_qpn: 0x10005,
        psn: 0x77,
        mtu: Mtu::B4096,
        key_set: 3,
        heard: true,
        waiting: false,
        executed: Messages { all: 7, receives: 2 },
        exact: true,
        completed: Messages { all: 9, receives: 9 },
        unproven_psn: Some(0x78),
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
    let further_ports = vec![PortRecord { gid: Gid([8; 16]), control_qpn: 3, lid: 5 }];
    let nic = NicRecord {
        index: 0,
        gid: Gid([7; 16]),
        address: Gid([8; 16]),
        control_qpn: 9,
        key_set: 1,
        lid: 5,
        name: "a/0".into(),
        further_ports,
    };
    let nics = vec![nic; 2];
    let record = ProcessRecord { pid: 77, nics }.encode(5).expect("within the limits");
    inputs.push([&[1], &record[..]].concat());
    inputs.push([&[2], Shape::standard(77).to_toml().as_bytes()].concat());
    for fault in [
        "nic a/0 dead",
        "cable b/1 cut",
        "switch rail0 down",
        "loss a/0 1%",
        "rate a/0 10Gbit",
        "delay a/0 5ms tx",
    ] {
        inputs.push([&[3], fault.as_bytes()].concat());
    }
    // An IPv6 header, and an IPv4 header with its checksum behind what looks like one.
    let mut header = [0x60; 40];
    inputs.push([&[4], &header[..]].concat());
    header[20..].copy_from_slice(&[
        0x45, 104, 0, 100, 0, 0, 0x40, 0, 64, 17, 0x26, 0x1f, 10, 0, 0, 1, 10, 0, 0, 2,
    ]);
    inputs.push([&[4], &header[..]].concat());
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
