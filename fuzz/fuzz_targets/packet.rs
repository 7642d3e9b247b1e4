//! Packets from outside, on live QPs. See `world`.
#![no_main]

#[path = "../src/world.rs"]
#[allow(dead_code)]
mod world;

libfuzzer_sys::fuzz_target!(|input: &[u8]| world::run(input));
