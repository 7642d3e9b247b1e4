//! Writes the seed corpus of `packet`: `seeds DIRECTORY`. The same at every run.

mod world;

use std::path::Path;
use world::kind;

fn main() -> std::io::Result<()> {
    let dir = std::env::args().nth(1).expect("usage: seeds DIRECTORY");
    std::fs::create_dir_all(&dir)?;
    let packets = world::sample_packets();
    let mut count = 0;
    let mut save = |input: &[u8]| {
        world::run(input);
        count += 1;
        std::fs::write(Path::new(&dir).join(format!("seed-{count:03}")), input)
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
    println!("{count} seeds in {dir}");
    Ok(())
}

fn put(input: &mut Vec<u8>, kind: u8, arg: u8, bytes: &[u8]) {
    input.extend([kind, arg]);
    input.extend((bytes.len() as u16).to_be_bytes());
    input.extend(bytes);
}
