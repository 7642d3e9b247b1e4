//! What else comes from outside: control messages of peers and the headers before them, values of
//! the directory and its URL, the fabric's file and the faults of a command.
//!
//! The first byte says which. Whatever is accepted must be written back to something that reads the
//! same, and nothing may panic.
#![no_main]

use std::path::Path;
use unbroken_fabric::{Fault, Shape};
use unbroken_failover_protocol::Message;
use unbroken_types::{Gid, Grh};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some((&kind, input)) = input.split_first() else { return };
    match kind % 5 {
        0 => control(input),
        1 => directory(input),
        2 => fabric(input),
        3 => fault(input),
        _ => header(input),
    }
});

/// Messages one behind the other, as a datagram carries them.
fn control(mut input: &[u8]) {
    while let Ok((message, rest)) = Message::decode(input) {
        assert!(rest.len() < input.len(), "a message has no length");
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        assert_eq!(Message::decode(&bytes), Ok((message, &[][..])));
        input = rest;
    }
}

fn directory(input: &[u8]) {
    unbroken_directory::check_value(input);
    if let Ok(text) = std::str::from_utf8(input) {
        let _ = unbroken_directory::Settings::parse_public(text)
            .map(|settings| format!("{settings:?}"));
    }
}

fn fabric(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Ok(shape) = Shape::parse(text, Path::new("fabric.toml")) {
        let again = Shape::parse(&shape.to_toml(), Path::new("fabric.toml"))
            .expect("what was written reads");
        assert_eq!(again, shape);
    }
}

fn fault(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Ok(fault) = text.parse::<Fault>() {
        let again: Fault = fault.to_string().parse().expect("what was written reads");
        assert_eq!(again, fault);
    }
}

/// The header before a datagram: the sender is the one of the version that the header is of.
fn header(input: &[u8]) {
    let Some(bytes) = input.first_chunk() else { return };
    let read = Grh::parse(bytes).map(|grh| grh.source);
    let v6 = Gid(bytes[8..24].try_into().expect("16 bytes"));
    let octets: [u8; 4] = bytes[32..36].try_into().expect("4 bytes");
    let v4 = Gid::from_ip(octets.into());
    match (bytes[0] >> 4, bytes[20]) {
        (6, 0x45) => assert!(read == Some(v4) || read == Some(v6)),
        (6, _) => assert_eq!(read, Some(v6)),
        (_, version) => assert_eq!(read, (version >> 4 == 4).then_some(v4)),
    }
}
