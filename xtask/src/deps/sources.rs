//! What a source file must not have: I/O in a pure crate, `unsafe` where it is not allowed, too
//! many lines.

use super::layers::Package;
use super::modules::{attributes, only_for_tests};
use std::path::Path;
use syn::visit::{self, Visit};
use syn::UseTree;

/// Paths that a pure crate must not name, nor anything below them.
const IMPURE: &[&[&str]] = &[
    &["std", "net", "UdpSocket"],
    &["std", "net", "TcpStream"],
    &["std", "net", "TcpListener"],
    &["std", "time"],
    &["std", "thread"],
    &["std", "fs"],
    &["std", "process"],
    &["std", "env"],
    &["Instant", "now"],
    &["SystemTime"],
];
/// A file longer than this is an error; longer than [`LONG_LINES`] it is listed.
pub const MAX_LINES: usize = 700;
pub const LONG_LINES: usize = 600;

/// Breaches in the file `path` (relative to the workspace) of a crate.
pub fn breaches(path: &Path, text: &str, of: Option<&Package>) -> Vec<String> {
    let shown = path.display();
    let mut wrong = Vec::new();
    let lines = text.lines().count();
    if lines > MAX_LINES {
        wrong.push(format!("{shown}: {lines} lines: split it, {MAX_LINES} is the limit"));
    }
    let Some(of) = of else { return wrong };
    let inside = path.strip_prefix(&of.folder).unwrap_or(path);
    let is_root = inside == Path::new("src/lib.rs") || inside == Path::new("src/main.rs");
    if is_root && !of.may_use_unsafe && !text.contains("#![forbid(unsafe_code)]") {
        let say = "or say in its manifest why it needs unsafe ([package.metadata.unbroken])";
        wrong.push(format!("{shown}: add #![forbid(unsafe_code)], {say}"));
    }
    if of.pure && inside.starts_with("src") {
        match syn::parse_file(text) {
            Ok(tree) => wrong.extend(impure(&tree).into_iter().map(|word| {
                let instead = "take time and packets as arguments, leave I/O to a shell";
                format!("{shown}: {word} in a pure crate: {instead}")
            })),
            Err(e) => wrong.push(format!("{shown}: {e}")),
        }
    }
    wrong
}

/// What of [`IMPURE`] a file names outside of its tests.
fn impure(tree: &syn::File) -> Vec<String> {
    let mut names = Names(Vec::new());
    for item in tree.items.iter().filter(|item| !only_for_tests(attributes(item))) {
        names.visit_item(item);
    }
    let named = |path: &[String]| {
        IMPURE
            .iter()
            .any(|bad| path.len() >= bad.len() && bad.iter().zip(path).all(|(b, p)| b == p))
    };
    names.0.iter().filter(|path| named(path)).map(|path| path.join("::")).collect()
}

/// Collects paths, of code and of `use`.
struct Names(Vec<Vec<String>>);

impl Names {
    fn flatten(&mut self, tree: &UseTree, at: &mut Vec<String>) {
        match tree {
            UseTree::Path(path) => {
                at.push(path.ident.to_string());
                self.flatten(&path.tree, at);
                at.pop();
            }
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.flatten(tree, at)),
            UseTree::Glob(_) => self.0.push(at.clone()),
            UseTree::Name(syn::UseName { ident })
            | UseTree::Rename(syn::UseRename { ident, .. }) => {
                let mut path = at.clone();
                path.push(ident.to_string());
                self.0.push(path);
            }
        }
    }
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.flatten(&item.tree, &mut Vec::new());
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !only_for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.0.push(path.segments.iter().map(|s| s.ident.to_string()).collect());
        visit::visit_path(self, path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_judged_by_their_crate() {
        let of = |pure, may_use_unsafe| Package {
            name: "unbroken-new".to_string(),
            folder: "crates/nic/new".to_string(),
            layer: "nic".to_string(),
            pure,
            may_use_unsafe,
            dependencies: Vec::new(),
        };
        let judge = |file: &str, text: &str, pure, may_use_unsafe| {
            let path = Path::new("crates/nic/new").join(file);
            breaches(&path, text, Some(&of(pure, may_use_unsafe))).len()
        };
        assert_eq!(judge("src/lib.rs", "", true, false), 1, "no forbid(unsafe_code)");
        assert_eq!(judge("src/lib.rs", "", false, true), 0);
        for bad in [
            "use std::time::Instant;",
            "use std::{fmt, thread::spawn};",
            "use std::net::UdpSocket as U;",
            "fn f() { let now = std::time::SystemTime::now(); }",
            "mod inner { fn f() { std::env::var(\"A\"); } }",
        ] {
            assert_eq!(judge("src/a.rs", bad, true, false), 1, "{bad}");
            assert_eq!(judge("src/a.rs", bad, false, false), 0, "{bad}");
            assert_eq!(judge("tests/a.rs", bad, true, false), 0, "{bad}");
        }
        for good in [
            "use std::net::IpAddr; use core::time::Duration;",
            "// std::time is not for us\n#[cfg(test)]\nmod tests { use std::thread; }",
        ] {
            assert_eq!(judge("src/a.rs", good, true, false), 0, "{good}");
        }
        assert_eq!(judge("src/a.rs", &"\n".repeat(MAX_LINES + 1), false, false), 1);
    }
}
