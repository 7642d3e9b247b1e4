//! Which file of a crate uses which: read from the syntax tree, and searched for circles.
//!
//! A file uses another if it names something that is defined there: by `use`, or by a path. Names
//! are followed through re-exports, so `use crate::Core` is a use of the file that defines `Core`.
//! Not counted: `mod` lines, re-exports by themselves (`pub use`), and what is compiled for tests
//! only. Arguments of macros are read where they are expressions.

use crate::workspace::Result;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, Item, ItemMod, ItemUse, Token, UseTree, Visibility};

/// Circles of more files than this are breaches.
const MAX_CIRCLE: usize = 5;
/// Crates whose files form no circle at all.
const NO_CIRCLE: &[&str] = &["crates/failover/shift"];
/// Re-exports of re-exports are followed so far.
const MAX_HOPS: usize = 16;

/// A module: where it stands, what it defines, and what it names.
#[derive(Default)]
struct Module {
    file: PathBuf,
    parent: Option<usize>,
    children: HashMap<String, usize>,
    items: HashSet<String>,
    /// Names that `use` brings in, with their paths.
    names: HashMap<String, Vec<String>>,
    /// Paths of `use …::*`.
    globs: Vec<Vec<String>>,
    /// Paths that the module's code names.
    mentions: BTreeSet<Vec<String>>,
}

/// The modules of one crate; the first is its root.
struct Crate {
    modules: Vec<Module>,
}

/// Circles of too many files in the crate whose root file is `root`; files are shown relative to
/// `base`.
pub fn circles(root: &Path, base: &Path) -> Result<Vec<String>> {
    let uses = uses(root)?;
    let of = |krate: &str| root.starts_with(base.join(krate));
    let most = if NO_CIRCLE.iter().any(|krate| of(krate)) { 0 } else { MAX_CIRCLE };
    let mut wrong = Vec::new();
    for circle in components(&uses).into_iter().filter(|c| c.len() > most) {
        let names: Vec<String> = circle
            .iter()
            .map(|f| f.strip_prefix(base).unwrap_or(f).display().to_string())
            .collect();
        let count = circle.len();
        wrong.push(format!(
            "{count} files use one another in a circle, {most} at most may: {}",
            names.join(", ")
        ));
    }
    Ok(wrong)
}

/// For each file of the crate whose root file is `root`, a line with the files that it uses, and
/// with a mark behind those that lead back to it.
pub fn describe(root: &Path) -> Result<Vec<String>> {
    let uses = uses(root)?;
    let base = root.parent().unwrap_or(root);
    let shown = |f: &PathBuf| f.strip_prefix(base).unwrap_or(f).display().to_string();
    let lines = uses.iter().filter(|(_, used)| !used.is_empty()).map(|(file, used)| {
        let marked = used.iter().map(|it| {
            let back = if reachable(&uses, it).contains(file) { "*" } else { "" };
            shown(it) + back
        });
        format!("{}: {}", shown(file), marked.collect::<Vec<_>>().join(" "))
    });
    Ok(lines.collect())
}

/// For each file of a crate, the files that it uses.
fn uses(root: &Path) -> Result<BTreeMap<PathBuf, BTreeSet<PathBuf>>> {
    let mut all = Crate { modules: Vec::new() };
    let folder = root.parent().ok_or("a crate's root lies in no folder")?;
    all.read(root, folder, None)?;
    let mut uses: BTreeMap<PathBuf, BTreeSet<PathBuf>> = BTreeMap::new();
    for (at, module) in all.modules.iter().enumerate() {
        let used = uses.entry(module.file.clone()).or_default();
        let names_a_thing = |path: &&Vec<String>| !module.is_variable(path);
        for path in module.mentions.iter().chain(&module.globs).filter(names_a_thing) {
            if let Some(it) = all.find(at, path, MAX_HOPS) {
                if all.modules[it].file != module.file {
                    used.insert(all.modules[it].file.clone());
                }
            }
        }
    }
    Ok(uses)
}

impl Crate {
    /// Reads a file and the files of its modules, whose folder is `folder`.
    fn read(&mut self, file: &Path, folder: &Path, parent: Option<usize>) -> Result<usize> {
        let shown = file.display();
        let text = std::fs::read_to_string(file).map_err(|e| format!("{shown}: {e}"))?;
        let tree = syn::parse_file(&text).map_err(|e| format!("{shown}: {e}"))?;
        self.add(file, folder, parent, &tree.items)
    }

    fn add(
        &mut self,
        file: &Path,
        folder: &Path,
        parent: Option<usize>,
        items: &[Item],
    ) -> Result<usize> {
        let me = self.modules.len();
        self.modules.push(Module { file: file.to_path_buf(), parent, ..Module::default() });
        for item in items.iter().filter(|item| !only_for_tests(attributes(item))) {
            match item {
                Item::Mod(module) => {
                    let child = self.add_child(file, folder, me, module)?;
                    self.modules[me].children.insert(module.ident.to_string(), child);
                }
                Item::Use(one) => self.modules[me].import(one),
                _ => {
                    self.modules[me].items.extend(name_of(item));
                    let mut reader = Mentions { found: &mut self.modules[me].mentions };
                    reader.visit_item(item);
                }
            }
        }
        Ok(me)
    }

    fn add_child(
        &mut self,
        file: &Path,
        folder: &Path,
        me: usize,
        module: &ItemMod,
    ) -> Result<usize> {
        let name = module.ident.to_string();
        let inner = folder.join(&name);
        if let Some((_, items)) = &module.content {
            return self.add(file, &inner, Some(me), items);
        }
        let places = [folder.join(format!("{name}.rs")), inner.join("mod.rs")];
        let found = places.iter().find(|place| place.exists());
        let found = found.ok_or_else(|| format!("{}: no file for mod {name}", file.display()))?;
        self.read(found, &inner, Some(me))
    }

    /// The module that defines what `path`, named in module `from`, leads to; None for other
    /// crates.
    fn find(&self, from: usize, path: &[String], hops: usize) -> Option<usize> {
        let hops = hops.checked_sub(1)?;
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => self.walk(0, rest, hops),
            "self" => self.walk(from, rest, hops),
            "super" => self.walk(self.modules[from].parent?, rest, hops),
            _ => self.step(from, path, hops),
        }
    }

    /// Follows `path` from module `at`, which it is in.
    fn walk(&self, at: usize, path: &[String], hops: usize) -> Option<usize> {
        match path.first().map(String::as_str) {
            None => Some(at),
            Some("super") => self.walk(self.modules[at].parent?, &path[1..], hops),
            Some(_) => self.step(at, path, hops),
        }
    }

    /// Follows a path whose first name is one of module `at`.
    fn step(&self, at: usize, path: &[String], hops: usize) -> Option<usize> {
        let (first, rest) = path.split_first()?;
        let module = &self.modules[at];
        if module.items.contains(first) {
            return Some(at);
        }
        if let Some(child) = module.children.get(first) {
            return self.walk(*child, rest, hops);
        }
        if let Some(alias) = module.names.get(first) {
            // `use thing;` of another crate leads to itself.
            if alias.len() == 1 && alias[0] == *first {
                return None;
            }
            let whole: Vec<String> = alias.iter().chain(rest).cloned().collect();
            return self.find(at, &whole, hops);
        }
        module.globs.iter().find_map(|glob| {
            let it = self.find(at, glob, hops)?;
            (it != at).then(|| self.walk(it, path, hops)).flatten()
        })
    }
}

impl Module {
    /// Whether a path is the name of a child alone. A module is no value, so that it is a variable
    /// of the same name.
    fn is_variable(&self, path: &[String]) -> bool {
        match path {
            [name] => self.children.contains_key(name) && !self.items.contains(name),
            _ => false,
        }
    }

    fn import(&mut self, item: &ItemUse) {
        let exported = !matches!(item.vis, Visibility::Inherited);
        let mut paths = Vec::new();
        flatten(&item.tree, &mut Vec::new(), &mut paths);
        for (name, path) in paths {
            match name {
                Some(name) => {
                    if !exported {
                        self.mentions.insert(path.clone());
                    }
                    self.names.insert(name, path);
                }
                None => self.globs.push(path),
            }
        }
    }
}

/// The paths of a `use`, each with the name that it gets; None for a glob.
fn flatten(tree: &UseTree, at: &mut Vec<String>, into: &mut Vec<(Option<String>, Vec<String>)>) {
    match tree {
        UseTree::Path(path) => {
            at.push(path.ident.to_string());
            flatten(&path.tree, at, into);
            at.pop();
        }
        UseTree::Group(group) => group.items.iter().for_each(|tree| flatten(tree, at, into)),
        UseTree::Glob(_) => into.push((None, at.clone())),
        UseTree::Name(name) if name.ident == "self" => {
            into.push((at.last().cloned(), at.clone()));
        }
        UseTree::Name(name) => {
            let mut path = at.clone();
            path.push(name.ident.to_string());
            into.push((Some(name.ident.to_string()), path));
        }
        UseTree::Rename(rename) => {
            let mut path = at.clone();
            if rename.ident != "self" {
                path.push(rename.ident.to_string());
            }
            into.push((Some(rename.rename.to_string()), path));
        }
    }
}

/// Collects the paths that code names.
struct Mentions<'a> {
    found: &'a mut BTreeSet<Vec<String>>,
}

impl<'ast> Visit<'ast> for Mentions<'_> {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            self.found.insert(path.segments.iter().map(|s| s.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, it: &'ast syn::Macro) {
        if let Ok(arguments) = it.parse_body_with(Punctuated::<Expr, Token![,]>::parse_terminated) {
            arguments.iter().for_each(|argument| self.visit_expr(argument));
        }
        visit::visit_macro(self, it);
    }

    fn visit_item_mod(&mut self, it: &'ast ItemMod) {
        if !only_for_tests(&it.attrs) {
            visit::visit_item_mod(self, it);
        }
    }

    /// `pub(crate)` names no file: it says who may use the item.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}
}

/// Whether `#[cfg(test)]` stands there, or a condition that needs it.
pub fn only_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().filter(|a| a.path().is_ident("cfg")).any(|a| {
        let mut test = false;
        // What it cannot read (a nested condition) is no plain `test`.
        let _ = a.parse_nested_meta(|meta| {
            test |= meta.path.is_ident("test");
            if meta.path.is_ident("all") {
                meta.parse_nested_meta(|inner| {
                    test |= inner.path.is_ident("test");
                    Ok(())
                })?;
            }
            Ok(())
        });
        test
    })
}

/// The attributes of an item.
pub fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(i) => &i.attrs,
        Item::Enum(i) => &i.attrs,
        Item::Fn(i) => &i.attrs,
        Item::Impl(i) => &i.attrs,
        Item::Macro(i) => &i.attrs,
        Item::Mod(i) => &i.attrs,
        Item::Static(i) => &i.attrs,
        Item::Struct(i) => &i.attrs,
        Item::Trait(i) => &i.attrs,
        Item::Type(i) => &i.attrs,
        Item::Union(i) => &i.attrs,
        Item::Use(i) => &i.attrs,
        _ => &[],
    }
}

/// The name that an item defines.
fn name_of(item: &Item) -> Option<String> {
    let name = match item {
        Item::Const(i) => &i.ident,
        Item::Enum(i) => &i.ident,
        Item::Fn(i) => &i.sig.ident,
        Item::Macro(i) => i.ident.as_ref()?,
        Item::Static(i) => &i.ident,
        Item::Struct(i) => &i.ident,
        Item::Trait(i) => &i.ident,
        Item::Type(i) => &i.ident,
        Item::Union(i) => &i.ident,
        _ => return None,
    };
    Some(name.to_string())
}

/// Sets of files that all reach one another (strongly connected components), of two or more.
fn components(uses: &BTreeMap<PathBuf, BTreeSet<PathBuf>>) -> Vec<BTreeSet<PathBuf>> {
    let reach: BTreeMap<&PathBuf, BTreeSet<&PathBuf>> =
        uses.keys().map(|file| (file, reachable(uses, file))).collect();
    let mut done: BTreeSet<&PathBuf> = BTreeSet::new();
    let mut found = Vec::new();
    for (file, reached) in &reach {
        if done.contains(*file) || !reached.contains(*file) {
            continue;
        }
        let circle: BTreeSet<&PathBuf> = reached
            .iter()
            .filter(|f| reach.get(**f).is_some_and(|r| r.contains(*file)))
            .copied()
            .collect();
        done.extend(&circle);
        found.push(circle.into_iter().cloned().collect());
    }
    found
}

/// The files that a file uses, those that these use, and so on.
fn reachable<'a>(
    uses: &'a BTreeMap<PathBuf, BTreeSet<PathBuf>>,
    from: &PathBuf,
) -> BTreeSet<&'a PathBuf> {
    let mut reached = BTreeSet::new();
    let mut next: Vec<&PathBuf> = uses[from].iter().collect();
    while let Some(file) = next.pop() {
        if reached.insert(file) {
            next.extend(uses.get(file).into_iter().flatten());
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A crate of some files; gives what uses what, by file names.
    fn crate_of(files: &[(&str, &str)]) -> (PathBuf, BTreeMap<String, Vec<String>>) {
        let name = files.iter().map(|(_, text)| text.len()).sum::<usize>();
        let folder = std::env::temp_dir().join(format!("xtask-{}-{name}", std::process::id()));
        for (file, text) in files {
            let file = folder.join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }
        let shown = |f: &PathBuf| f.strip_prefix(&folder).unwrap().display().to_string();
        let uses = uses(&folder.join("lib.rs")).unwrap();
        let uses = uses.iter().map(|(f, used)| (shown(f), used.iter().map(shown).collect()));
        let uses = uses.filter(|(_, used): &(String, Vec<String>)| !used.is_empty()).collect();
        (folder, uses)
    }

    #[test]
    fn names_are_followed_to_where_they_are_defined() {
        let (folder, uses) = crate_of(&[
            (
                "lib.rs",
                "mod a; mod b; mod c; mod d; pub use a::Thing; use std::fmt; fn f(b: u8) { b; }",
            ),
            (
                "a.rs",
                "pub(crate) struct Thing { pub(super) it: u8 } #[cfg(test)] mod tests { use \
                 crate::d::D; }",
            ),
            ("b.rs", "use crate::Thing; fn f() { vec![super::c::inner::g()]; fmt::x(); }"),
            ("c.rs", "pub mod inner; use self::inner::*; fn h() { g() }"),
            ("c/inner.rs", "pub fn g() {}"),
            ("d.rs", "pub(crate) struct D; use super::a::*; type Mine = Thing;"),
        ]);
        std::fs::remove_dir_all(folder).unwrap();
        let expected = [
            ("b.rs", vec!["a.rs", "c/inner.rs"]),
            ("c.rs", vec!["c/inner.rs"]),
            ("d.rs", vec!["a.rs"]),
        ];
        let expected =
            expected.map(|(f, used)| (f.to_string(), used.iter().map(|u| u.to_string()).collect()));
        assert_eq!(uses, BTreeMap::from(expected));
    }

    #[test]
    fn a_circle_of_six_files_is_found() {
        let circle = |n: usize| {
            let mods: String = (0..n).map(|i| format!("mod m{i};")).collect();
            let files: Vec<(String, String)> = (0..n)
                .map(|i| {
                    (
                        format!("m{i}.rs"),
                        format!("pub struct S; use crate::m{}::S as T;", (i + 1) % n),
                    )
                })
                .collect();
            let mut all = vec![("lib.rs", mods.as_str())];
            all.extend(files.iter().map(|(f, t)| (f.as_str(), t.as_str())));
            let (folder, _) = crate_of(&all);
            let found = circles(&folder.join("lib.rs"), &folder).unwrap();
            std::fs::remove_dir_all(folder).unwrap();
            found
        };
        assert_eq!(circle(5), Vec::<String>::new());
        assert!(circle(6)[0].contains("6 files"), "{:?}", circle(6));
    }

    #[test]
    fn two_files_are_a_circle_where_none_may_be() {
        let at = |file: &str| format!("{}/{file}", NO_CIRCLE[0]);
        let (root, a, b) = (at("lib.rs"), at("a.rs"), at("b.rs"));
        let (folder, _) = crate_of(&[
            ("lib.rs", ""),
            (&root, "mod a; mod b;"),
            (&a, "pub struct A; use crate::b::B;"),
            (&b, "pub struct B; use crate::a::A;"),
        ]);
        let found = circles(&folder.join(&root), &folder).unwrap();
        std::fs::remove_dir_all(folder).unwrap();
        assert!(matches!(&found[..], [circle] if circle.contains("2 files")), "{found:?}");
    }
}
