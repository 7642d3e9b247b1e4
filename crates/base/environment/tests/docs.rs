//! The table is what the documents list, and what the sources read.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use unbroken_environment::{variable, Part, PREFIX, VARIABLES};

const PAGE: &str = "docs/reference/environment.md";
/// Constants of headers and versions, which are no variables.
const OTHER_NAMES: [&str; 2] = ["UNBROKEN_SEND_NO_REPLAY", "UNBROKEN_1"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

/// Without links in brackets, and backquotes.
fn plain(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(" ([") {
        let Some(end) = rest[at..].find("))") else { break };
        out += &rest[..at];
        rest = &rest[at + end + 2..];
    }
    (out + rest).replace('`', "").trim().to_string()
}

/// The rows of a page's tables.
fn rows(text: &str) -> Vec<Vec<String>> {
    let cells = |line: &str| line.trim_matches('|').split('|').map(plain).collect();
    // The page has other tables, too, of values.
    text.lines().filter(|line| line.starts_with("| `UNBROKEN_")).map(cells).collect()
}

#[test]
fn the_page_lists_the_table() {
    let page = fs::read_to_string(root().join(PAGE)).unwrap();
    let listed = rows(&page);
    let of = |part| VARIABLES.iter().filter(move |v| v.part == part);
    let table = of(Part::Programs).chain(of(Part::Collectives)).chain(of(Part::Others));
    let table: Vec<Vec<String>> = table
        .map(|v| vec![v.name.into(), v.values.right(), v.meaning.into(), v.default.into()])
        .collect();
    for (listed, wanted) in listed.iter().zip(&table) {
        assert_eq!(listed, wanted, "{PAGE} on the left, the table on the right");
    }
    assert_eq!(listed.len(), table.len());
}

/// All names in a text that look like variables.
fn names(text: &str) -> BTreeSet<&str> {
    let whole = |rest: &str| {
        let end = rest.find(|c: char| !(c.is_ascii_uppercase() || c == '_' || c.is_ascii_digit()));
        end.unwrap_or(rest.len())
    };
    let named = text.match_indices(PREFIX).map(|(at, _)| &text[at..at + whole(&text[at..])]);
    named.filter(|name| name.len() > PREFIX.len()).collect()
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
        let name = entry.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if entry.is_dir() && !name.starts_with('.') && name != "target" && name != "tests" {
            files(&entry, found);
        } else if ["rs", "py", "sh", "md", "c"].iter().any(|e| name.ends_with(&format!(".{e}"))) {
            found.push(entry);
        }
    }
}

/// What a program reads, and what a page names, is a variable that the table has: another is
/// refused by the command.
#[test]
fn every_name_in_the_sources_is_in_the_table() {
    let mut found = Vec::new();
    for folder in ["crates", "python", "docs", "benches", "packaging"] {
        files(&root().join(folder), &mut found);
    }
    assert!(found.len() > 300, "{} files", found.len());
    let own = Path::new("base/environment");
    for file in found.iter().filter(|f| !f.to_string_lossy().contains(own.to_str().unwrap())) {
        let text = fs::read_to_string(file).unwrap_or_default();
        for name in names(&text) {
            let known = variable(name).is_some()
                || OTHER_NAMES.contains(&name)
                || VARIABLES.iter().any(|v| v.name.starts_with(name) && name.ends_with('_'));
            assert!(known, "{}: {name}", file.display());
        }
    }
}

#[test]
fn names_are_there_once_and_defaults_are_possible() {
    let names: BTreeSet<&str> = VARIABLES.iter().map(|v| v.name).collect();
    assert_eq!(names.len(), VARIABLES.len());
    for v in VARIABLES.iter().filter(|v| matches!(v.default, "0" | "1")) {
        assert!(v.values.allow(v.default), "{}", v.name);
    }
}
