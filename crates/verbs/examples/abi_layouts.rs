//! Prints the layouts of `unbroken_verbs::abi`, a line each: `NAME SIZE` and `NAME.FIELD OFFSET`.
//! Read by `cargo xtask abi`.

fn main() {
    for l in unbroken_verbs::abi::layouts() {
        println!("{} {}", l.name, l.size);
        for (field, offset) in l.fields {
            println!("{}.{} {}", l.name, field.trim_start_matches("r#"), offset);
        }
    }
}
