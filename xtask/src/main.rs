//! Build helper of the workspace.
fn main() {}
