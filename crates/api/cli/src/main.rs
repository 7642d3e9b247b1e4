//! The `unbroken` command; see the library of this crate.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    unbroken_cli::main()
}
