//! Exports the functions of `python.rs` alone.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Threads that Python has left in it outlive a dlclose(), and must find their code.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // The linker's own names for the bounds of a section are exported otherwise.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,start-stop-visibility=hidden");
}
