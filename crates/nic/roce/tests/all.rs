//! All tests of the transport in one program: what it is built of is compiled and linked once, and
//! not for each of them.

mod atomics;
mod batch;
mod common;
mod exchange;
mod garbage;
mod keys;
mod migration;
mod peer_keys;
mod rc;
mod rc_packets;
mod read_pieces;
mod room;
mod selective;
mod srq;
mod uc;
mod ud;
mod wrap;

/// A file that is not named above would be compiled by nobody.
#[test]
fn no_test_is_left_out() {
    let named = include_str!("all.rs");
    for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests")).unwrap() {
        let file = entry.unwrap().file_name().into_string().unwrap();
        let module = file.trim_end_matches(".rs");
        assert!(
            module == "all" || named.contains(&format!("\nmod {module};\n")),
            "{file} is not in all.rs"
        );
    }
}
