//! Gives the C library its SONAME, and exports the functions of its header alone.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let major = env!("CARGO_PKG_VERSION_MAJOR");
    // Programs that were linked with one major version keep it, whatever else is installed.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libunbroken_coll.so.{major}");
    // Threads of the library outlive a dlclose(), and must find their code.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // The linker's own names for the bounds of a section are exported otherwise.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,start-stop-visibility=hidden");
}
