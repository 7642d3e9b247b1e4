//! What a peer says about a logical QP, under the right seal. See `control`.
#![no_main]

#[path = "../src/control.rs"]
#[allow(dead_code)]
mod control;

libfuzzer_sys::fuzz_target!(|input: &[u8]| control::run(input));
